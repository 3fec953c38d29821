"""Two replicas of two ranks each say what one rank says, in whatever a step may hold: prompts in chunks beside running
sequences, cached pages, every kind of sampling, grammars, logprobs, drafts or none, preemption, and a replica that has
less to do than the other, or nothing.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine import drafting
from engine.drafting import COUNTED, CPU, GREEDY, SEEDED, SHAPED, questions
from engine.harness import eager, request
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.core import Grammar, GrammarKind, Request, SequenceOutput, Submit
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.model.parallel import ParallelDims
from millrace_testing import paths
from millrace_testing.tolerances import LOGPROB_TOLERANCE
from model.ranks import run_jobs

TP, DP, PAGE = 2, 2, 16
LIMITS = {
    "num_pages": 80, "page_size": PAGE, "max_model_len": 256, "max_running": 4, "max_prefill_tokens": 60,
    "draft_batches": (4, 3, 2), "checks": ("canary", "poison"),
}  # fmt: skip
TIGHT = {"num_pages": 20}  # for little more than one sequence of the greatest length
CASES = ((0, "off", {}), (1, "on", TIGHT), (3, "on", {}))  # drafts, graphs, limits
REGEX = Grammar(GrammarKind.REGEX, r"[A-Z][a-z]{4,9}( [a-z]{3,8}){3} is [0-9]{3}!")
PROPERTIES = '{"a": {"enum": ["up", "down"]}, "b": {"type": "boolean"}}'
SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, f'{{"type": "object", "properties": {PROPERTIES}, "required": ["a", "b"]}}')
Arrivals = dict[int, list[Request]]  # before which of its steps a replica gets which requests


class Served(msgspec.Struct):
    said: dict[int, list[SequenceOutput]]  # by room
    steps: set[str]  # what there was in a step: of this replica, and of all
    preemptions: int
    accepted: int


def arrivals() -> list[Arrivals]:
    """Of each replica. The second one has nothing at first, and the first one nothing in the end."""
    noise = [[10 + (7 * i + n) % 500 for i in range(n)] for n in (130, 200)]

    def ask(room: int, prompt: list[int], num: int, **sampling: Any) -> Request:
        return request(room, prompt, max_tokens=num, logprobs=1, **sampling)

    return [
        {
            0: [ask(0, noise[0], 20, **GREEDY), ask(1, questions()[0], 40, **SEEDED)],
            2: [ask(2, questions()[1], 30, **COUNTED)],
            3: [ask(3, questions()[2], 16, **SHAPED)],
            4: [ask(4, questions()[0], 40, grammar=SCHEMA, ignore_eos=False, **GREEDY)],
            36: [ask(5, noise[0] + questions()[1], 8, **SEEDED)],
        },
        {
            9: [ask(6, questions()[2], 40, grammar=REGEX, ignore_eos=False, **SEEDED)],
            11: [ask(7, noise[1], 20, **COUNTED), ask(8, questions()[0], 30, **GREEDY)],
            52: [ask(9, noise[1][:150] + questions()[2], 24, **SHAPED)],
        },
    ]


def serve_rank(dims: ParallelDims, drafts: int, graphs: str, limits: dict[str, int], folder: str) -> str:
    """A Served in JSON."""
    options = Execution.model_validate({"graphs": graphs, "chunk_graph_tokens": 64})
    wanted = Limits.model_validate({**LIMITS, "draft_tokens": drafts, **limits})
    rank = load_rank(wanted, Role.UNIFIED, paths.TINY, dims, CPU, torch.float32, execution=options)
    if dims.tp_rank:
        rank.follow()
        return ""
    eager(rank.lockstep)
    one, mine = rank.engine(), arrivals()[dims.dp_rank]
    said: dict[int, list[SequenceOutput]] = {each.id.room: [] for group in mine.values() for each in group}
    steps, launch, count = set[str](), rank.runner.launch, 0
    done = [Path(folder) / f"{drafts}-{graphs}-{len(limits)}-{replica}" for replica in range(dims.dp)]

    def watched(batch: Any) -> Any:
        own, other = batch.dp_num_tokens[dims.dp_rank], batch.dp_num_tokens[1 - dims.dp_rank]
        kinds = {"mixed": batch.num_decode and batch.chunk_lens, "uneven": own < other, "empty": other and not own}
        steps.update(name for name, there in {**kinds, f"{batch.num_queries} rows": batch.num_decode}.items() if there)
        return launch(batch)

    rank.runner.launch = watched  # type: ignore[method-assign]
    if (chunks := rank.runner._chunk_graphs) is not None:
        replay = chunks.forward
        chunks.forward = lambda inputs: (steps.add("a graph with chunks"), replay(inputs))[1]  # type: ignore[method-assign]
    while not one.stopped:
        for each in mine.get(count, []):
            one.submit(Submit(each))
        for output in one.step().outputs:
            said[output.id.room].append(output)
        if count > max(mine) and not (one.has_work() or one.load().waiting):  # a grammar may be compiled
            done[dims.dp_rank].touch()
            if all(each.exists() for each in done):
                one.stop()
        count += 1
    one.check_idle()
    load = one.load()
    one.close()
    return msgspec.json.encode(Served(said, steps, load.counters["preemptions"], sum(load.accepted))).decode()


@pytest.mark.long
def test_answers_are_those_of_one_rank(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    asked = [each for replica in arrivals() for group in replica.values() for each in group]
    expected = drafting.run(drafting.engine(0), asked)
    jobs = [(TP, DP, serve_rank, (*case, str(tmp_path))) for case in CASES]
    for case, ranks in zip(CASES, run_jobs(jobs, tmp_path), strict=True):
        drafts, graphs, limits = case
        leaders = [msgspec.json.decode(one, type=Served) for one in ranks[::TP]]
        said = {room: outputs for one in leaders for room, outputs in one.said.items()}
        for room in expected:
            check(said[room], expected[room], (case, room))
        assert (sum(one.accepted for one in leaders) > 0) is (drafts > 0), case
        assert (sum(one.preemptions for one in leaders) > 0) is bool(limits), case
        if not limits:
            assert [said[room][0].found.cached_tokens for room in (0, 5, 7, 9)] == [0, 8 * PAGE, 0, 9 * PAGE], case
        kinds = {"mixed", "uneven", "empty", f"{1 + drafts} rows"}  # the one that ends last never has an empty step
        assert set.union(*(one.steps for one in leaders)) >= kinds, (case, leaders[0].steps, leaders[1].steps)
        assert all(("a graph with chunks" in one.steps) is (graphs == "on") for one in leaders), case


def check(found: list[SequenceOutput], expected: list[SequenceOutput], where: object) -> None:
    tokens, wanted = ([token for output in one for token in output.tokens] for one in (found, expected))
    assert [token.token_id for token in tokens] == [token.token_id for token in wanted], where
    assert found[-1].finish is expected[-1].finish, where
    for of in (lambda token: token.logprob, lambda token: token.top[0].logprob):
        assert [of(token) for token in tokens] == pytest.approx([of(token) for token in wanted], abs=LOGPROB_TOLERANCE)
