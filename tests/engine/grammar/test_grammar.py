"""Grammars in the engine: the gate in front of the scheduler, and masks that always belong to the outputs so far.

The fake grammar allows three tokens that depend on every output before; the fake device takes one of them. A mask that
is one token too old, or belongs to another sequence, gives another continuation than the one computed here.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
from engine.drafted_masks import bits_of, check_masks
from engine.harness import SETTINGS, Driver, FakeConnection, FakeReplicas, fill_pages, first_output, request
from engine.joined import ranks_together
from millrace_common.grammar.checker import CompilerStarved, NobodyWaits
from millrace_common.grammar.source import GrammarError
from millrace_common.reasons import Reason
from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import (
    Abort,
    FinishReason,
    Grammar,
    GrammarKind,
    KvArrived,
    KvOffered,
    Request,
    RequestId,
    Route,
    SamplingParams,
    Submit,
)
from millrace_serve.engine.grammar.grammars import MAX_COMPILED, Grammars
from millrace_serve.engine.lockstep.lockstep import Lockstep
from millrace_serve.engine.schedule.plan import StepOutput
from millrace_serve.engine.sim.runner import SimRunner
from millrace_serve.engine.step.batch import HostBatch

V = SETTINGS.vocab_size
WORDS = -(-V // 32)
FREE = Grammar(GrammarKind.REGEX, "free")
AFTER = Grammar(GrammarKind.REGEX, "after", after_token_id=77)


def allowed(tokens: list[int]) -> list[int]:
    state = 7
    for token in tokens:
        state = (state * 31 + token) % 9973
    return sorted({16 + (state + k * 61) % (V - 16) for k in range(3)})


def mask_of(tokens: list[int]) -> np.ndarray:
    mask = np.zeros(WORDS, np.int64)
    for token in tokens:
        mask[token // 32] |= 1 << token % 32
    return mask.astype(np.uint32).view(np.int32)


def pick(bits: list[int], output_index: int) -> int:
    return bits[output_index % len(bits)]


def expected(count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(pick(allowed(tokens), len(tokens)))
    return tokens


def constrained(
    room: int, ids: list[int], grammar: Grammar = FREE, route: Route = Route.LOCAL, **fields: object
) -> Request:
    return request(room, ids, route, **{"ignore_eos": False, "grammar": grammar, **fields})


class FakeMatcher:
    def __init__(self, dead_end: int | None, too_complex: bool = False) -> None:
        self._tokens: list[int] = []
        self._dead_end = dead_end
        self._too_complex = too_complex

    @property
    def error(self) -> str:
        return "out of fuel" if self._too_complex and len(self._tokens) == self._dead_end else ""

    @property
    def mask(self) -> np.ndarray:
        return mask_of([] if len(self._tokens) == self._dead_end else allowed(self._tokens))

    def accept(self, token: int) -> bool:
        legal = token in bits_of(self.mask)
        self._tokens += [token] * legal
        return legal

    def rollback(self, count: int) -> None:
        assert count <= len(self._tokens)
        del self._tokens[len(self._tokens) - count :]


FAULTS = {"starved": CompilerStarved("try again"), "broken": BlockingIOError("no process can be started")}


class FakeCompiler:
    """Holds compilations back while its gate is shut; the text "bad" cannot be compiled, others at first."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.left: list[str] = []  # given up while they were compiled
        self.gate = threading.Event()
        self.gate.set()

    def compile(self, grammar: Grammar, given_up: threading.Event) -> Callable[[], FakeMatcher]:
        while not self.gate.wait(0.01):
            if given_up.is_set():
                self.left.append(grammar.text)
                raise NobodyWaits
        self.compiled.append(grammar.text)
        if grammar.text == "bad":
            raise GrammarError("it is bad")
        if grammar.text in FAULTS and self.compiled.count(grammar.text) == 1:
            raise FAULTS[grammar.text]
        ends = grammar.text in ("dead end", "too complex")
        return lambda: FakeMatcher(4 if ends else None, grammar.text == "too complex")

    def free(self, grammar: Grammar) -> np.ndarray:
        forbidden = {SETTINGS.eos_token_id, *grammar.forbidden_before}
        return mask_of([token for token in range(V) if token not in forbidden])

    def close(self) -> None:
        self.gate.set()


class MaskedRunner(SimRunner):
    """Takes an allowed token where there is a mask, else what SimRunner takes."""

    def _sample(self, batch: HostBatch, corrupt: dict[int, str]) -> StepOutput:
        output = super()._sample(batch, corrupt)
        if batch.sampling is not None and batch.sampling.grammar is not None:
            lens = [1] * batch.num_decode + [batch.chunk_lens[chunk] for chunk in batch.sampling_chunks]
            index = self._lengths[batch.sample_slots] + lens - self._num_prompt[batch.sample_slots]
            rows = [batch.num_queries] * batch.num_decode + [1] * len(batch.sampling_chunks)
            first = np.cumsum(rows) - rows
            for row, mask in zip(*batch.sampling.grammar, strict=True):
                sample = int(np.searchsorted(first, row, side="right")) - 1
                draft = int(row - first[sample])
                output.tokens[sample, draft] = pick(bits_of(mask), int(index[sample]) + draft)
        return output


class GrammarDriver(Driver):
    def __init__(self, role: Role, **config: object) -> None:
        self.compiler = FakeCompiler()
        self.grammars = Grammars(self.compiler, lambda: self.clock())
        super().__init__(role, grammars=self.grammars, **{"num_pages": 40, **config})
        runner = MaskedRunner(self.settings, self.engine.pool, self.config)
        self.engine._runner, self.engine._builder._on_join = runner, runner.join

    def expected(self, id: RequestId) -> list[int]:
        params = self.requests[id].sampling
        return expected(params.max_tokens) if params.grammar else super().expected(id)

    def finish_compiling(self) -> None:
        self.compiler.gate.set()
        self.grammars._threads.submit(lambda: None).result()
        while self.grammars.waiting:
            self.step()

    def run_compiled(self) -> None:
        self.finish_compiling()
        self.run()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_pages", [40, 11])
def test_every_mask_is_of_the_outputs_so_far(overlap: bool, num_pages: int) -> None:
    """Three with and three without a grammar through three slots; with 11 pages they throw each other out."""
    driver = GrammarDriver(Role.UNIFIED, overlap=overlap, num_pages=num_pages, prefix_cache=False)
    for room in range(1, 7):
        make = constrained if room % 2 else request
        driver.submit(make(room, [20 + room] * (3 + room), max_tokens=14))
        driver.finish_compiling()
    driver.run()
    assert all(output.finish is FinishReason.LENGTH for output in driver.finish.values()) and len(driver.finish) == 6
    assert (driver.engine.load().counters["preemptions"] > 0) is (num_pages == 11)
    driver.check_whole()


# A value of each sampling option that changes what a step samples, or when a sequence ends.
OPTIONS: dict[str, dict[str, object]] = {
    "max_tokens": {"max_tokens": 9},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 0.7, "top_k": 5},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "min_p": {"temperature": 0.7, "min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "seed": {"temperature": 0.7, "seed": 7},
    "logit_bias": {"logit_bias": {20: 1.0}},
    "min_tokens": {"ignore_eos": False, "min_tokens": 6},
    "stop_token_ids": {"stop_token_ids": (50, 51)},
    "ignore_eos": {"ignore_eos": False},
    "logprobs": {"logprobs": 2},
    "grammar": {"ignore_eos": False, "grammar": FREE},
}


def spoken(driver: Driver, steps: int) -> dict[int, list[int]]:
    """For each room: the steps with a token of it, once per token."""
    found: dict[int, list[int]] = {}
    for step in range(steps):
        for output in driver.step().outputs:
            found.setdefault(output.id.room, []).extend([step] * len(output.tokens))
    return found


@pytest.mark.parametrize("draft_tokens", [0, 1])
@pytest.mark.parametrize("option", SamplingParams.__struct_fields__)
def test_running_sequence_takes_part_in_every_step(option: str, draft_tokens: int) -> None:
    """With each option, beside one without options and a long prompt. No draft is accepted; behind the last but one
    token, a step with drafts may have reached the limit, and the sequence waits for its result.
    """
    settings = SETTINGS.model_copy(update={"acceptance": 0.0})
    config = {"overlap": True, "max_model_len": 128, "num_pages": 99, "draft_tokens": draft_tokens}
    driver = GrammarDriver(Role.UNIFIED, settings=settings, **config)
    driver.submit(request(1, [20, 21], **{"max_tokens": 20, **OPTIONS[option]}))
    driver.finish_compiling()
    driver.submit(request(2, [20, 22], max_tokens=30), request(3, [23] * 40, max_tokens=4))
    for room, steps in spoken(driver, 60).items():
        sure = steps[: len(steps) - draft_tokens]
        assert sure == list(range(sure[0], sure[0] + len(sure))), f"request {room}: {steps}"
    assert len(driver.finish) == 3
    driver.check_whole()


def test_replicas_wait_for_the_grammar_of_one() -> None:
    """All commit a step before they plan the next one, so none waits in the agreement for another."""
    replicas, awaited, found = FakeReplicas(2), [[], []], [{}, {}]

    def replica(rank: int) -> None:
        driver = GrammarDriver(Role.UNIFIED, overlap=True, max_model_len=128)
        driver.engine._lockstep = Lockstep(replicas.of(rank))
        one = constrained(0, [20, 21], max_tokens=8) if rank == 0 else request(1, [20, 21], max_tokens=20)
        driver.grammars.walk(constrained(2, [20]))  # compiled before the first step
        driver.submit(one)
        schedule = driver.scheduler.schedule
        driver.scheduler.schedule = lambda: (awaited[rank].append(not driver.engine._in_flight), schedule())[1]
        found[rank] = spoken(driver, 30)[rank]

    ranks_together(replica, 2)
    assert awaited[0] == awaited[1] == [True] * 9 + [False] * 12 + [True] * 9
    assert [steps == list(range(steps[0], steps[0] + len(steps))) for steps in found] == [True, True]


def test_decode_worker_goes_on_from_the_prefill_workers_token() -> None:
    driver = GrammarDriver(Role.DECODE)
    asked = constrained(1, [20] * 6, route=Route.IMPORT, max_tokens=9)
    driver.compiler.gate.clear()
    driver.step(asked, KvOffered(asked.id))  # while the grammar is being compiled
    assert driver.grammars.waiting and not driver.reserved and driver.engine.wait_s() == pytest.approx(0.005)
    driver.run_compiled()
    fill_pages(driver, driver.reserved[asked.id].page_ids, asked.token_ids, 0)
    driver.arrived[asked.id] = expected(1)[0]
    driver.run(KvArrived(asked.id, first_output(driver, asked.id)))
    assert driver.tokens[asked.id] == expected(9)


def test_prefill_workers_token_is_masked_too() -> None:
    driver = GrammarDriver(Role.PREFILL)
    driver.submit(constrained(1, [20] * 9, route=Route.EXPORT))
    driver.run_compiled()
    assert driver.tokens[RequestId(1, 0)] == expected(1)


def test_grammar_that_begins_behind_a_token() -> None:
    walk = Grammars(FakeCompiler()).walk(constrained(1, [5], AFTER))
    eos = SETTINGS.eos_token_id
    for token in (40, 50, 60):
        assert eos not in bits_of(walk.mask) and len(bits_of(walk.mask)) == V - 1
        assert walk.accept([token]) is None
    assert walk.accept([77]) is None and bits_of(walk.mask) == allowed([])
    assert walk.accept([allowed([])[0]]) is None


@pytest.mark.parametrize("grammar", [FREE, AFTER])
def test_masks_along_drafts(grammar: Grammar) -> None:
    """Every number of masks comes, and drafts that pass the token behind which the grammar begins."""
    grammars, after = Grammars(FakeCompiler()), grammar.after_token_id
    one = constrained(1, [5], grammar)
    seen = [check_masks(lambda: grammars.walk(one), seed, V, SETTINGS.eos_token_id, after) for seed in range(60)]
    assert {count for count, _ in seen} == {1, 2, 3, 4}
    assert any(passed for _, passed in seen) is (after is not None)
    grammars.close()


def test_drafts_that_the_grammar_cannot_go_on_from() -> None:
    tokens = expected(4)
    walk = Grammars(FakeCompiler()).walk(constrained(1, [5], Grammar(GrammarKind.REGEX, "dead end")))
    assert walk.accept(tokens[:2]) is None
    assert [bits_of(mask) for mask in walk.masks(tokens[2:])] == [allowed(tokens[:2]), allowed(tokens[:3])]


def test_refusals() -> None:
    driver = GrammarDriver(Role.UNIFIED)
    for room, text in enumerate(("bad", "bad", "dead end", "too complex"), start=1):
        driver.submit(constrained(room, [20], Grammar(GrammarKind.REGEX, text)))
        driver.finish_compiling()
    driver.run()
    said = {id.room: output.error.message for id, output in driver.finish.items() if output.error}
    assert said[1] == said[2] == "regex: it is bad"
    assert "no continuation" in said[3] and driver.tokens[RequestId(3, 0)] == expected(4)
    assert said[4].endswith("too complex to go on after this output: out of fuel")
    assert driver.compiler.compiled == ["bad", "dead end", "too complex"], "a grammar is compiled once"
    driver.check_whole()
    assert "no tokenizer" in Grammars().walk(constrained(1, [20])).message
    contradicted = driver.grammars.walk(constrained(4, [20, 199], prior=1))
    assert "does not allow token 199" in contradicted.message


@pytest.mark.parametrize(("text", "reason"), [("starved", Reason.OVERLOADED), ("broken", Reason.INTERNAL)])
def test_compilation_that_failed_is_tried_again_for_those_who_come_later(text: str, reason: Reason) -> None:
    """Those who waited for it share its end: none compiles it again in the engine's thread, where all would wait."""
    driver = GrammarDriver(Role.UNIFIED)
    driver.compiler.gate.clear()
    for room in (1, 2, 3):
        driver.submit(constrained(room, [20], Grammar(GrammarKind.REGEX, text), max_tokens=2))
        if room == 2:
            driver.compiler.gate.set()
            wait([job.compiled for job in driver.grammars._jobs.values()])
    driver.run()
    assert {output.error.reason for output in driver.finish.values()} == {reason} and driver.compiler.compiled == [text]
    driver.submit(constrained(4, [20], Grammar(GrammarKind.REGEX, text), max_tokens=2))
    driver.run_compiled()
    assert driver.tokens[RequestId(4, 0)] == expected(2)
    driver.check_whole()


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 1}, {"grammar": Grammar("regex", "x", V)}])
def test_what_cannot_go_with_a_grammar(fields: dict[str, object]) -> None:
    driver = GrammarDriver(Role.UNIFIED)
    driver.submit(constrained(1, [20], **fields))
    driver.run_compiled()
    assert "grammar" in driver.finish[RequestId(1, 0)].error.message


def test_aborts_and_deadlines_do_not_wait_for_a_compilation() -> None:
    driver = GrammarDriver(Role.UNIFIED)
    driver.compiler.gate.clear()
    driver.submit(constrained(1, [20, 21], timeout_s=5.0), constrained(2, [20, 22], timeout_s=5.0))
    driver.run(request(3, [20, 23]), Abort(RequestId(1, 0)))
    assert set(driver.finish) == {RequestId(1, 0), RequestId(3, 0)}, "the others pass"
    assert driver.finish[RequestId(1, 0)].finish is FinishReason.ABORT
    driver.clock.now += 6.0
    driver.step()
    assert driver.finish[RequestId(2, 0)].error.reason == "DEADLINE_EXCEEDED"
    assert driver.engine.load().waiting == 0
    driver.finish_compiling()
    driver.run_out()


def test_what_nobody_waits_for_any_more_is_not_compiled() -> None:
    driver = GrammarDriver(Role.UNIFIED)
    driver.compiler.gate.clear()
    for room, text in enumerate(("first", "second", "shared", "shared", "left")):  # two threads have the first two
        driver.submit(constrained(room, [20], Grammar(GrammarKind.REGEX, text), max_tokens=2))
    for room in (2, 4):
        driver.tell(Abort(RequestId(room, 0)))
    driver.tell(Abort(RequestId(0, 0)))
    while "first" not in driver.compiler.left:  # its thread looks from time to time
        driver.step()
    driver.run_compiled()
    assert sorted(driver.compiler.compiled) == ["second", "shared"]
    driver.submit(constrained(5, [20], Grammar(GrammarKind.REGEX, "left"), max_tokens=2))
    driver.run_compiled()
    ended = {id.room: output.finish.value for id, output in driver.finish.items()}
    assert ended == {0: "abort", 1: "length", 2: "abort", 3: "length", 4: "abort", 5: "length"}
    driver.check_whole()


def test_oldest_grammars_are_forgotten() -> None:
    compiler = FakeCompiler()
    grammars = Grammars(compiler)
    for text in [*map(str, range(MAX_COMPILED)), "0", "new", "1"]:
        one = constrained(1, [20], Grammar(GrammarKind.REGEX, text))
        grammars.admit(Submit(one))
        grammars.walk(one)
        grammars.admitted()
    assert (
        compiler.compiled.count("0") == 1 and compiler.compiled.count("1") == 2 and len(grammars._jobs) == MAX_COMPILED
    )
    grammars.close()


def test_grammar_that_somebody_waits_for_is_kept() -> None:
    """However many there are: compiled again it would throw out the next one, and so on."""
    driver = GrammarDriver(Role.UNIFIED, max_waiting=1000)
    driver.compiler.gate.clear()
    for room in range(MAX_COMPILED + 5):
        driver.submit(constrained(room, [20], Grammar(GrammarKind.REGEX, str(room)), max_tokens=1))
    driver.compiler.gate.set()
    driver.grammars._threads.shutdown(wait=True)
    driver.grammars._threads = ThreadPoolExecutor(1)
    driver.submit(constrained(1000, [20], Grammar(GrammarKind.REGEX, "new"), max_tokens=1))
    driver.run_compiled()
    assert len(driver.compiler.compiled) == len(set(driver.compiler.compiled)) == MAX_COMPILED + 6
    driver.check_whole()


def test_requests_whose_grammar_is_being_compiled_are_counted() -> None:
    driver = GrammarDriver(Role.UNIFIED, max_running=1, max_waiting=2)
    driver.compiler.gate.clear()
    for room in range(3):
        driver.submit(constrained(room, [20], max_tokens=1))
    driver.run(request(3, [20], max_tokens=1))
    assert (driver.engine.load().waiting, driver.engine.load().capacity) == (3, 0)
    assert driver.finish[RequestId(3, 0)].error.reason == "OVERLOADED"
    driver.run_compiled()
    assert sum(output.finish is FinishReason.LENGTH for output in driver.finish.values()) == 3
    driver.check_whole()


def test_followers_are_given_the_same_masks() -> None:
    """A tensor-parallel leader's batches, masks included, are all that its followers need."""
    connection, driver = FakeConnection(), GrammarDriver(Role.UNIFIED)
    driver.engine._lockstep = Lockstep(followers=[connection])
    driver.submit(constrained(1, [20, 21, 22], max_tokens=6))
    driver.run_compiled()
    driver.engine.close()
    pool = KvPool(driver.engine.pool.layout, driver.config.num_pages)
    runner, tokens = MaskedRunner(driver.settings, pool, driver.config), []

    class Recording:
        def launch(self, batch: HostBatch) -> object:
            handle = runner.launch(batch)
            tokens.extend(handle.result().tokens[:, 0].tolist())
            return handle

    Lockstep(leader=connection).follow(Recording(), lambda copies: None)  # type: ignore[arg-type]
    assert tokens == driver.tokens[RequestId(1, 0)] == expected(6)
