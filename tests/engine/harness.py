"""An engine under test: what it said, request by request, and whether its pages are in order."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from engine.sequence_check import check_sequence
from millrace_common.page_hash import page_hashes
from millrace_serve.engine.config import GIB, EngineConfig, Role
from millrace_serve.engine.core import (
    EngineInput,
    Events,
    FinishReason,
    KvChunk,
    KvReserved,
    LeaseEnded,
    Request,
    RequestId,
    Route,
    SamplingParams,
    SequenceOutput,
    Submit,
    TokenOutput,
)
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.grammar.grammars import Grammars
from millrace_serve.engine.lockstep.links import FRAME
from millrace_serve.engine.lockstep.lockstep import Lockstep
from millrace_serve.engine.lockstep.replicas import ReplicaState
from millrace_serve.engine.sim.factory import build_sim_engine, sim_layout
from millrace_serve.engine.sim.runner import SimSettings
from millrace_testing import HANG_S
from millrace_testing.oracle import oracle_outputs

TINY = {"num_pages": 14, "page_size": 4, "max_model_len": 32, "max_running": 3, "max_waiting": 50}
SETTINGS = SimSettings(vocab_size=200, page_kv_bytes=8, eos_lengths=(2, 12))


class FakeReplicas:
    """Replicas in threads that meet in every step, also in those in which none has work."""

    def __init__(self, size: int) -> None:
        self._barrier, self._values = threading.Barrier(size, timeout=HANG_S), [ReplicaState()] * size

    def of(self, index: int) -> "FakeReplica":
        return FakeReplica(index, self._barrier, self._values)


@dataclass
class FakeReplica:
    index: int
    barrier: threading.Barrier
    values: list[ReplicaState]
    fds: Sequence[int] = ()

    def called(self) -> bool:
        return True

    def all_gather(self, mine: ReplicaState, *, ring: bool) -> list[ReplicaState]:
        self.values[self.index] = mine
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


def eager(lockstep: Lockstep) -> Lockstep:
    """It meets in every step, so that all replicas count the same steps."""
    if lockstep._replicas is not None:
        lockstep._replicas.called = lambda: True  # type: ignore[method-assign]
    return lockstep


class FakeConnection:
    """Between a leader and its followers, one after the other in one thread."""

    def __init__(self) -> None:
        self._sent: list[bytes] = []

    def send(self, message: bytes) -> None:
        self._sent.append(message)

    def receive_message(self) -> bytes:
        return self._sent.pop(0)[FRAME.size :]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Driver:
    """Collects the Events of a simulated engine and holds them against the oracle."""

    def __init__(
        self,
        role: Role,
        settings: SimSettings = SETTINGS,
        grammars: Grammars | None = None,
        host_pages: int = 0,
        folder: Path | None = None,
        **config: object,
    ) -> None:
        """`host_pages`: copies that the host tier has room for. `folder`: of the disk tier."""
        self.clock = Clock()
        self.config = EngineConfig.model_validate({**TINY, "max_prefill_tokens": 6, "checks": ("poison",), **config})
        if host_pages:
            gib = host_pages * sim_layout(self.config, settings).page_bytes / GIB
            self.config = self.config.model_copy(update={"host_cache_gib": gib, "disk_cache": folder})
        self.settings = settings
        self.engine: Engine = build_sim_engine(self.config, role, settings, clock=self.clock, grammars=grammars)
        self.engine.open_store()
        self.scheduler = self.engine._scheduler
        self.here = self.scheduler.requests
        self.cache = self.scheduler.pages.cache
        self.requests: dict[RequestId, Request] = {}
        self.tokens: dict[RequestId, list[int]] = {}  # outputs of the room, those before this engine included
        self.finish: dict[RequestId, SequenceOutput] = {}
        self.parts: dict[RequestId, list[KvChunk]] = {}
        self.reserved: dict[RequestId, KvReserved] = {}
        self.served: dict[RequestId, KvChunk] = {}  # answers to Serve
        self.arrived: dict[RequestId, int] = {}  # first tokens that the other worker sampled
        self.preempted: set[RequestId] = set()  # perhaps before a step used their pages

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.requests[request.id] = request
            self.tokens[request.id] = request.token_ids[len(request.token_ids) - request.num_prior_outputs :]
            self.engine.submit(Submit(request))

    def tell(self, *inputs: Request | EngineInput) -> None:
        for one in inputs:
            self.submit(one) if isinstance(one, Request) else self.engine.submit(one)

    def step(self, *inputs: Request | EngineInput) -> Events:
        """With these; so `run` and `run_out`."""
        self.tell(*inputs)
        events = self.engine.step()
        self.preempted |= {id for id, seq in self.here.live.items() if seq.preempted}
        for output in events.outputs:
            self._take(output)
        for part in events.chunks:
            if part.id.room == 0:
                self.served[part.id] = part
                continue
            parts = self.parts.setdefault(part.id, [])
            assert not (parts and parts[-1].last), f"a part of {part.id} after the last one"
            assert part.first_page == sum(len(p.page_ids) for p in parts)
            assert len(part.page_ids) == len(part.fingerprints)
            parts.append(part)
        for reserved in events.reserved:
            assert reserved.id not in self.reserved
            self.reserved[reserved.id] = reserved
        self.check_pages()
        return events

    def end_leases(self) -> None:
        self.run()
        self.run(*map(LeaseEnded, [*self.parts, *self.served]))

    def finish_all(self) -> None:
        self.end_leases()
        self.check_whole()

    def run(self, *inputs: Request | EngineInput, max_steps: int = 1000) -> int:
        """Step until nothing is left to do or to copy; returns the number of steps."""
        self.tell(*inputs)
        for count in range(max_steps):
            if not self.engine.has_work() and not self.copying():
                return count
            self.step()
        raise AssertionError(f"still working after {max_steps} steps: {self.engine.load()}")

    def run_out(self, *inputs: Request | EngineInput) -> None:
        self.run(*inputs)
        self.check_whole()

    def copying(self) -> bool:
        """Whether copies between the device and the host tier will end."""
        return bool(self.engine.host._under_way)

    def expected(self, id: RequestId) -> list[int]:
        request = self.requests[id]
        prompt = request.token_ids[: len(request.token_ids) - request.num_prior_outputs]
        return oracle_outputs(prompt, request.sampling, self.settings)

    def check_finished(self, id: RequestId) -> None:
        """A request that ended without failure has every token, and said why it ended."""
        output, expected = self.finish[id], self.expected(id)
        if output.finish in (FinishReason.STOP, FinishReason.LENGTH):
            assert self.tokens[id] == expected
            assert output.finish is self.expected_finish(id)

    def expected_finish(self, id: RequestId) -> FinishReason:
        expected, params = self.expected(id), self.requests[id].sampling
        stops = {*params.stop_token_ids} | (set() if params.ignore_eos else {self.settings.eos_token_id})
        stopped = expected[-1] in stops and len(expected) > params.min_tokens
        return FinishReason.STOP if stopped else FinishReason.LENGTH

    def check_pages(self) -> None:
        """No page belongs to two sequences unless it is a shared, complete one; nothing that is used is free."""
        self.engine.check_idle()
        for seq in self.here.live.values():
            check_sequence(seq)
        waiting = [len(seq.tokens) for seq in self.here.live.values() if seq in self.here.waiting._members]
        assert (len(self.here.waiting), self.here.waiting.num_tokens) == (len(waiting), sum(waiting))
        cache = self.cache
        owners = Counter(page for seq in self.here.live.values() for page in seq.pages)
        for page, count in owners.items():
            assert cache.pool.state(page) < 2, f"page {page} has an owner but is not running or published"
            assert count == 1 or page in cache._tree._by_page, f"page {page} is owned {count} times and not shared"
        free = [page for page in range(1, self.config.num_pages) if cache.pool.state(page) == 3]
        assert not set(free) & set(owners)

    def check_whole(self) -> None:
        """Everything is over: no sequence, no page, no slot is left behind."""
        assert not self.engine.has_work() and not self.copying()
        assert not self.scheduler.served_pages
        assert not self.here.live and not self.scheduler.leaving and not len(self.here.waiting)
        assert self.here.num_active == 0
        load = self.engine.load()
        assert not any((load.running, load.waiting, load.importing, load.exporting, load.waiting_tokens)), load
        assert len(self.scheduler.pages._slots) == self.config.max_running
        pool = self.cache.pool
        assert pool.num_free + pool.num_cached == pool.total
        self.cache.flush()
        assert pool.num_free == pool.total and self.cache.host.tier.used == 0
        for id in self.requests:
            assert id in self.finish or id in self.parts, f"request {id} was never answered"

    def _take(self, output: SequenceOutput) -> None:
        assert output.id not in self.finish, f"{output.id} spoke after its end"
        tokens = self.tokens[output.id]
        if output.first_index > len(tokens) and output.id in self.arrived:
            tokens.append(self.arrived.pop(output.id))
        assert output.first_index == len(tokens), (output, tokens)
        tokens += [token.token_id for token in output.tokens]
        expected = self.expected(output.id)
        assert tokens == expected[: len(tokens)], f"{output.id}: {tokens} is not a start of {expected}"
        if output.finish is not None:
            assert (output.error is not None) == (output.finish is FinishReason.ERROR)
            self.finish[output.id] = output
            self.check_finished(output.id)


def said(engine: Engine, batch: list[Request], *, close: bool = True) -> dict[int, list[tuple[int, float]]]:
    """Every token of each room and its logprob, and the end of the engine unless it is to go on."""
    answers: dict[int, list[tuple[int, float]]] = {}
    for one in batch:
        engine.submit(Submit(one))
    while (wait_s := engine.wait_s()) is not None:
        time.sleep(wait_s)
        for output in engine.step().outputs:
            assert output.error is None, output.error
            answers.setdefault(output.id.room, []).extend((token.token_id, token.logprob) for token in output.tokens)
    engine.check_idle()
    if close:
        engine.close()
    return answers


def canaries(token_ids: list[int], size: int, salt: bytes = b"") -> np.ndarray:
    """Of the pages of a prompt: u64 [pages, CANARY_WORDS]."""
    rows = []
    for index, block in enumerate(page_hashes(token_ids, size, salt=salt)):
        rows.append([*np.frombuffer(block, np.uint64), min(size, len(token_ids) - index * size)])
    return np.array(rows, np.uint64)


def fill_pages(driver: Driver, pages: Sequence[int], token_ids: list[int], first: int, salt: bytes = b"") -> None:
    """What a transfer does to reserved pages[first:]: the KV of `token_ids`, which here is its canary."""
    words = canaries(token_ids, driver.config.page_size, salt)[first:]
    driver.engine.pool.write_canaries(np.array(pages[first:], np.int64), words)


def first_output(driver: Driver, id: RequestId) -> SequenceOutput:
    """What the prefill worker of an IMPORT request reports."""
    request, expected = driver.requests[id], driver.expected(id)
    index = request.num_prior_outputs
    finish = driver.expected_finish(id) if index + 1 == len(expected) else None
    return SequenceOutput(id, index, [TokenOutput(expected[index])], finish)


def request(
    room: int,
    token_ids: list[int],
    route: Route = Route.LOCAL,
    *,
    prior: int = 0,
    priority: int = 0,
    timeout_s: float | None = None,
    fetches_prefix: bool = False,
    salt: bytes = b"",
    **sampling: object,
) -> Request:
    params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
    return Request(
        id=RequestId(room, 0),
        token_ids=token_ids,
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
        route=route,
        num_prior_outputs=prior,
        priority=priority,
        timeout_s=timeout_s,
        fetches_prefix=fetches_prefix,
        cache_salt=salt,
    )
