"""What a prefill worker's frontend does for a prefix fetch, with a scripted source and scripted ranks."""

import asyncio
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest
from handover.test_imports import Peer, frontend_of, settle
from millrace.v1 import prefill_pb2, worker_pb2
from millrace_common.page_hash import page_hashes
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError
from millrace_serve.engine.core import (
    Events,
    FinishReason,
    KvArrived,
    KvChunk,
    KvFailed,
    KvLate,
    KvOffered,
    KvReserved,
    LeaseEnded,
    Request,
    RequestId,
    Route,
    SamplingParams,
    SequenceOutput,
)
from millrace_serve.handover import prefix_fetches
from millrace_serve.handover.role import HandoverRole
from millrace_serve.transfer.base import MemoryHandle
from millrace_serve.transfer.messages import ReadDone, ReadPages, ReadStuck
from millrace_serve.worker.config import WorkerConfig, WorkerTimeouts
from millrace_serve.worker.frontend import load
from millrace_serve.worker.frontend.requests import ABORTED
from millrace_testing.blocks import block

ID = RequestId(9, 1)
PROMPT = list(range(200))  # 3 full pages and a bit
HASHES = page_hashes(PROMPT[:192], 64)
SOURCES = [MemoryHandle("nixl", "prefix_source", b"", 0, 64, 10)]


class Bench:
    """A prefill worker with one request that fetches; its engine is the test."""

    def __init__(self) -> None:
        self.engine: list[Any] = []
        self.reads: list[ReadPages] = []
        self.requests: Any = types.SimpleNamespace(submit=self._submit, count_stale=lambda kind: None)
        frontend = frontend_of(WorkerConfig(engine="sim"), self.requests, self.engine, self._transfer)
        self.metrics, self.board = frontend.metrics, frontend.board
        self.role = HandoverRole(frontend)
        self.prefix_source = Peer()
        peers = self.role.imports._peers
        peers._peers["p:1", "e"] = self.prefix_source  # type: ignore[assignment]
        peers._watch(self.prefix_source)  # type: ignore[arg-type]

    def _transfer(self, rank: int, message: Any) -> None:
        if isinstance(message, ReadPages):
            self.reads.append(message)

    def _submit(self, wire: worker_pb2.EngineRequest, route: Route, link: object, fetches_prefix: bool) -> Request:
        id = RequestId(wire.id.room, wire.id.attempt)
        sampling = SamplingParams(max_tokens=4)
        self.submitted = Request(
            id=id, token_ids=list(wire.token_ids), sampling=sampling, route=route, fetches_prefix=fetches_prefix
        )
        self.role.exports.expect(id, 0)
        return self.submitted

    def submit(self, num_pages: int = 3, fingerprint: str = "f", length: int = len(PROMPT)) -> None:
        message = prefill_pb2.PrefillRequest()
        message.request.id.room, message.request.id.attempt = ID.room, ID.attempt
        message.request.token_ids.extend(PROMPT[:length])
        worker = worker_pb2.KvSourceRef(address="p:1", epoch="e", fingerprint=fingerprint)
        message.prefix.CopyFrom(prefill_pb2.KvPrefixRef(worker=worker, replica=2, num_pages=num_pages))
        self.role.submit(None, message)  # type: ignore[arg-type]

    async def to(self, stage: str) -> None:
        """Stages: asked, offered, reading, releasing."""
        self.submit()
        await settle()
        if stage == "asked":
            return
        await self.prefix_source.says(SOURCES, KvChunk(ID, 0, [7, 8], HASHES[:2], 128, True))
        assert self.engine == [KvOffered(ID, 2)]
        if stage == "offered":
            return
        self.role.on_events(0, Events(reserved=[KvReserved(ID, [3, 4], 1)]))
        assert self.reads == [ReadPages(ID, 0, [8], [4], "prefix_source")]
        if stage == "reading":
            return
        self.prefix_source.answer = asyncio.CancelledError  # nothing is answered
        self.prefix_source.release = self._hear_release  # type: ignore[method-assign]
        self.role.handlers[ReadDone](0, ReadDone(ID, 0, "", 1))
        await settle()
        assert self.prefix_source.released == 1

    async def _hear_release(self) -> None:
        self.prefix_source.released += 1

    def failures(self) -> dict[str, float]:
        rows = self.metrics.prefix_fetch_failures.collect()[0].samples
        return {row.labels["reason"]: row.value for row in rows if row.name.endswith("_total")}

    def over(self, reason: Reason) -> None:
        """The prefix fetch is over, and the engine goes on without."""
        last = self.engine[-1]
        assert isinstance(last, KvFailed) and last.failure.reason == reason
        assert len(self.role.imports) == 0 and self.failures() == {reason: 1}


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.role.close()


STAGES = ["asked", "offered", "reading", "releasing"]


async def test_what_is_served_is_read_and_proved(bench: Bench) -> None:
    await bench.to("reading")
    assert bench.submitted.fetches_prefix
    assert bench.prefix_source.prefix is not None
    assert (bench.prefix_source.prefix.replica, list(bench.prefix_source.prefix.blocks)) == (2, HASHES)
    bench.role.handlers[ReadDone](0, ReadDone(ID, 0, "", 1))
    await settle()
    assert bench.prefix_source.released == 1 and bench.engine[1:] == [KvArrived(ID)] and bench.failures() == {}
    assert bench.metrics.prefix_fetch_pages.labels(direction="fetched")._value.get() == 1
    assert bench.board.reads.per_s > 0
    assert bench.board.prefix_fetch_s == 0  # the first prefix fetch of a source had to connect


async def test_further_prefix_fetches_of_a_prefix_source_are_measured_and_forgotten(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.to("reading")
    bench.role.imports._live[ID].connects = False  # type: ignore[attr-defined]
    bench.role.handlers[ReadDone](0, ReadDone(ID, 0, "", 1))
    await settle()
    assert bench.board.prefix_fetch_s > 0
    monkeypatch.setattr(load, "PREFIX_FETCH_MEMORY_S", 0.0)
    assert bench.board.prefix_fetch_s == 0


@pytest.mark.parametrize(("length", "pages"), [(200, 3), (193, 3), (192, 2)])
async def test_prefix_fetch_leaves_a_token_to_compute(bench: Bench, length: int, pages: int) -> None:
    bench.submit(num_pages=1000, length=length)
    assert len(bench.role.imports) == 1
    await settle()
    assert bench.prefix_source.prefix is not None and list(bench.prefix_source.prefix.blocks) == HASHES[:pages]


@pytest.mark.parametrize(("stage", "seconds"), [("asked", prefix_fetches.OFFER_S), ("reading", WorkerTimeouts().stall)])
async def test_prefix_fetch_has_a_limit_at_each_stage(bench: Bench, stage: str, seconds: float) -> None:
    began = asyncio.get_running_loop().time()
    await bench.to(stage)
    timer = bench.role._prefix_fetches._timers[ID]
    assert began + seconds <= timer.when() <= asyncio.get_running_loop().time() + seconds and not timer.cancelled()
    if stage == "reading":
        bench.role.handlers[ReadDone](0, ReadDone(ID, 0, "no route", 1))
        assert bench.role.imports._failed_reads.total == 0, "a failed prefix fetch fails no prompt, and ends no worker"
        assert bench.failures() == {Reason.TRANSFER_FAILED: 1}


@pytest.mark.parametrize("stage", STAGES)
async def test_lost_prefix_source_costs_only_the_prefix_fetch(bench: Bench, stage: str) -> None:
    await bench.to(stage)
    await bench.prefix_source.says(MillraceError(Reason.WORKER_LOST, "reset"))
    if stage == "reading":
        assert bench.engine[1:] == [KvLate(ID)]  # the engine need not wait for the reads
        bench.role.handlers[ReadDone](0, ReadDone(ID, 0, "peer lost", 1))
    bench.over(Reason.WORKER_LOST)


@pytest.mark.parametrize("stage", STAGES)
async def test_abort_ends_the_prefix_fetch_when_nothing_is_in_flight(bench: Bench, stage: str) -> None:
    await bench.to(stage)
    assert bench.requests.on_abort(ID, ABORTED)
    if stage == "reading":
        assert bench.engine == [KvOffered(ID, 2), KvLate(ID), LeaseEnded(ID)]  # only the pages wait for the reads
        bench.role.handlers[ReadDone](0, ReadDone(ID, 0, "", 1))
    await settle()
    failed = [message for message in bench.engine if isinstance(message, KvFailed)]
    assert [message.failure.reason for message in failed] == [Reason.CANCELLED] and len(bench.role.imports) == 0
    assert bench.prefix_source.released == (0 if stage == "asked" else 1)


@pytest.mark.parametrize("stage", STAGES)
async def test_request_that_the_engine_ends_ends_its_prefix_fetch(bench: Bench, stage: str) -> None:
    await bench.to(stage)
    bench.role.on_events(0, Events(outputs=[SequenceOutput(ID, 0, [], FinishReason.ABORT)]))
    if stage == "reading":
        assert bench.engine[1:] == [KvLate(ID)]  # a deadline passed, and the reads may never end
        bench.role.handlers[ReadDone](0, ReadDone(ID, 0, "", 1))
    assert len(bench.role.imports) == 0


@pytest.mark.parametrize("stage", ["asked", "reading", "releasing"])
async def test_nobody_waits_for_a_silent_prefix_source(
    bench: Bench, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timers of both limits, made short: of the offer, and of everything after the reservation."""
    if stage == "asked":
        monkeypatch.setattr(prefix_fetches, "OFFER_S", 0.01)
    else:
        bench.role._prefix_fetches._stall_s = 0.01
    await bench.to(stage)
    while not any(isinstance(message, KvLate | KvFailed) for message in bench.engine):
        await asyncio.sleep(0.005)
    if stage == "reading":
        assert bench.engine[-1] == KvLate(ID)
        bench.role.handlers[ReadDone](0, ReadDone(ID, 0, "", 1))
    bench.over(Reason.STALLED)


async def test_stuck_read_is_told_once(bench: Bench) -> None:
    await bench.to("reading")
    bench.role.handlers[ReadStuck](0, ReadStuck(ID, 0))
    bench.role.handlers[ReadStuck](0, ReadStuck(ID, 0))
    assert bench.engine[1:] == [KvLate(ID)]
    bench.role.handlers[ReadDone](0, ReadDone(ID, 0, "closed", 1))
    bench.over(Reason.STALLED)


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (KvChunk(ID, 0, [7, 8], [HASHES[0], block(1)], 128, True), Reason.KV_MISMATCH),  # of other tokens
        (KvChunk(ID, 0, [], [], 0, True), Reason.KV_NOT_FOUND),  # all of it was evicted
    ],
)
async def test_what_is_not_the_prefix_is_not_read(bench: Bench, chunk: KvChunk, reason: Reason) -> None:
    await bench.to("asked")
    await bench.prefix_source.says(SOURCES, chunk)
    bench.over(reason)


async def test_another_layout_is_not_asked_for(bench: Bench) -> None:
    bench.submit(fingerprint="other")
    await settle()
    assert not bench.submitted.fetches_prefix and len(bench.role.imports) == 0
    assert bench.engine == [] and bench.failures() == {Reason.LAYOUT_MISMATCH: 1}
