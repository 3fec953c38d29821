"""What the decode frontend does around the import state machine, with scripted peers and ranks: races that processes
lose only now and then.
"""

import asyncio
import gc
import types
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import grpc
import msgspec
import pytest
from millrace.v1 import decode_pb2, kv_pb2, worker_pb2
from millrace_common import metrics as catalogue
from millrace_common.page_hash import page_hashes
from millrace_common.reasons import Reason
from millrace_common.spans import OFF
from millrace_rpc.errors import MillraceError, from_rpc_error
from millrace_serve.engine.core import (
    Failure,
    FinishReason,
    KvArrived,
    KvChunk,
    KvFailed,
    KvOffered,
    KvReserved,
    Request,
    RequestId,
    SamplingParams,
    SequenceOutput,
    TokenOutput,
)
from millrace_serve.handover.role import HandoverRole
from millrace_serve.transfer.base import MemoryHandle
from millrace_serve.transfer.messages import AddSource, DropSource, ReadDone, ReadPages, ReadStuck
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.frontend.load import LoadBoard
from millrace_serve.worker.frontend.spans import WorkerSpans
from prometheus_client import CollectorRegistry

ID = RequestId(9, 1)
PROMPT = list(range(100))
FIRST = SequenceOutput(ID, 0, [TokenOutput(5)], drafts=(7, 8))
SOURCES = [MemoryHandle("nixl", f"p{rank}", b"", 0, 64, 10) for rank in range(2)]
PART = KvChunk(ID, 0, [7, 8], page_hashes(PROMPT, 64), 100, True, FIRST)  # all of it


class Peer:
    """And its one Fetch."""

    address, epoch = "p:1", "e"

    def __init__(self) -> None:
        self.agents: set[tuple[int, str]] = set()
        self.dropped = False
        self.reports: list[kv_pb2.ReadFailed] = []
        self.said: asyncio.Queue[Any] = asyncio.Queue()
        self.answer: Any = kv_pb2.ReleaseConfirmed()  # to a release; None: the stream ends
        self.released = 0
        self.ended = False
        self.watch: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def fetch(self, id: RequestId, fingerprint: str, stall_s: float, prefix: kv_pb2.FetchPrefix | None) -> Self:
        self.prefix = prefix
        return self

    async def says(self, *items: Any) -> None:
        """And all that follows from it happens."""
        for item in items:
            self.said.put_nowait(item)
        await settle()

    async def items(self) -> AsyncIterator[Any]:
        try:
            while (item := await self.said.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.ended = True

    async def failed(self, report: kv_pb2.ReadFailed) -> None:
        self.reports.append(report)

    async def release(self) -> None:
        self.released += 1
        self.said.put_nowait(self.answer)
        self.said.put_nowait(None)

    async def close(self) -> None: ...

    async def lost(self) -> bool:
        return await self.watch

    def renewed(self) -> None: ...


def frontend_of(
    config: WorkerConfig, requests: Any, engine: list[Any], send_reader: Callable[[int, Any], None], leave: Any = None
) -> Any:
    """Of a worker whose ranks are a test: `engine` gets what the engine is told."""
    layout = types.SimpleNamespace(fingerprint="f", page_bytes=64)
    ranks = types.SimpleNamespace(
        ready_info=types.SimpleNamespace(layout=layout, vocab_size=1000),
        of_replica=lambda replica: range(config.tp * replica, config.tp * (replica + 1)),
        send=lambda replica, message: engine.append(message),
        send_reader=send_reader,
    )
    return types.SimpleNamespace(
        config=config,
        epoch="ours",
        ranks=ranks,
        requests=requests,
        spans=WorkerSpans(OFF),
        metrics=catalogue.Metrics(catalogue.WORKER, CollectorRegistry()),
        board=LoadBoard(1, "ours", worker_pb2.LoadSnapshot),
        identity=None,
        secret=b"",
        leave=leave,
    )


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Bench:
    """One import of two pages on a replica of two ranks."""

    def __init__(self) -> None:
        self.engine: list[Any] = []
        self.transfer: list[tuple[int, Any]] = []
        self.failed: list[Failure] = []
        self.outputs: list[SequenceOutput] = []
        self.left: list[str] = []

        class Requests(set[RequestId]):
            deliver = self.outputs.extend
            fail = staticmethod(lambda id, failure: self.failed.append(failure))
            count_stale = staticmethod(lambda kind: None)
            submit = staticmethod(lambda request, route, link: self.engine.append(request))

        self.requests: Any = Requests([ID])
        config, transfer = WorkerConfig(engine="sim", tp=2), lambda *message: self.transfer.append(message)
        frontend = frontend_of(config, self.requests, self.engine, transfer, self.left.append)
        self.metrics = frontend.metrics
        self.role = HandoverRole(frontend)
        self.imports = self.role.imports
        self.peer = Peer()
        self.imports._peers._peers["p:1", "e"] = self.peer  # type: ignore[assignment]
        self.imports._peers._watch(self.peer)  # type: ignore[arg-type]
        request = Request(id=ID, token_ids=PROMPT, sampling=SamplingParams(max_tokens=4))
        self.imports.start(request, 0, worker_pb2.KvSourceRef(address="p:1", epoch="e"))

    def have_read(self) -> None:
        """Both ranks have."""
        for rank in (0, 1):
            self.imports.on_read_done(rank, ReadDone(ID, 0, "", 2))

    async def reading(self) -> None:
        """To both ranks reading the pages."""
        await self.peer.says(SOURCES, PART)
        assert self.engine == [KvOffered(ID)]
        self.imports.on_reserved(KvReserved(ID, [3, 4], 0))
        reads = [(rank, message) for rank, message in self.transfer if isinstance(message, ReadPages)]
        assert reads == [(rank, ReadPages(ID, 0, [7, 8], [3, 4], f"p{rank}")) for rank in (0, 1)]
        assert [(r, m.source) for r, m in self.transfer if isinstance(m, AddSource)] == list(enumerate(SOURCES))

    def quarantined(self) -> float:
        return float(self.metrics.quarantined._value.get())


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.role.close()


async def test_held_after_every_rank_has_read(bench: Bench) -> None:
    await bench.reading()
    bench.imports.on_read_done(0, ReadDone(ID, 0, "", 2))
    bench.imports.on_read_done(0, ReadDone(ID, 0, "", 2))  # said twice
    await settle()
    assert bench.peer.released == 0
    bench.imports.on_read_done(1, ReadDone(ID, 0, "", 2))
    await settle()
    assert bench.engine[1:] == [KvArrived(ID, FIRST)] and bench.outputs == [FIRST]
    assert len(bench.imports) == 0 and bench.failed == []
    assert bench.peer.ended and bench.metrics.kv_bytes._value.get() == 2 * 2 * 64, "two pages of each rank"


async def test_quarantine_counts_pages_of_reads_under_way_alone(bench: Bench) -> None:
    hashes = page_hashes(PROMPT, 64)
    await bench.peer.says(SOURCES, KvChunk(ID, 0, [7], hashes[:1], 64, False))
    bench.imports.on_reserved(KvReserved(ID, [3, 4], 0))
    await bench.peer.says(KvChunk(ID, 1, [8], hashes[1:], 100, True, FIRST))
    for rank in (0, 1):
        bench.imports.on_read_done(rank, ReadDone(ID, 0, "", 1))
    assert bench.quarantined() == 0
    assert bench.imports.abort(ID, Failure(Reason.CANCELLED, "gone")) and bench.quarantined() == 1
    for rank, pages in ((0, 1), (1, 0)):
        bench.imports.on_read_done(rank, ReadDone(ID, 1, "", 1))
        assert bench.quarantined() == pages and (ID in bench.imports) is bool(pages)


async def test_final_first_token_goes_out_without_the_end(bench: Bench) -> None:
    """The engine says the end, which is counted and delivered once."""
    final = msgspec.structs.replace(FIRST, finish=FinishReason.STOP)
    await bench.peer.says(SOURCES, msgspec.structs.replace(PART, first=final))
    assert bench.engine == [KvArrived(ID, final)] and bench.outputs == [FIRST]


@pytest.mark.parametrize("said", [[], [[]]], ids=["no memory", "the memory of no rank"])
async def test_pages_without_memory_fail_the_import_and_not_the_worker(bench: Bench, said: list[Any]) -> None:
    """They would be read when a rank has reported pages for them, and what that raises ends the worker."""
    await bench.peer.says(*said, PART)
    bench.imports.on_reserved(KvReserved(ID, [3, 4], 0))
    [failed] = bench.engine
    assert failed.failure.reason == Reason.TRANSFER_FAILED and len(bench.imports) == 0


async def test_peer_with_another_epoch_is_dropped(bench: Bench) -> None:
    await bench.peer.says(MillraceError(Reason.EPOCH_CHANGED, "it is another process"))
    [failed] = bench.engine
    assert failed.failure.reason == Reason.EPOCH_CHANGED and bench.peer.dropped


async def test_abort_during_reads_holds_the_pages_until_they_are_over(bench: Bench) -> None:
    await bench.reading()
    assert bench.imports.abort(ID, Failure(Reason.CANCELLED, "gone"))
    bench.imports.on_read_done(1, ReadDone(ID, 0, "", 2))
    await settle()
    assert bench.engine == [KvOffered(ID)] and bench.quarantined() == 2
    bench.imports.on_read_done(0, ReadDone(ID, 0, "", 2))
    await settle()
    assert bench.engine[1:] == [KvFailed(ID, Failure(Reason.CANCELLED, "gone"))]
    assert bench.failed == [] and bench.quarantined() == 0  # the engine's own output is the answer
    await settle()
    assert bench.peer.released == 1 and bench.peer.ended  # what we will not use is given back
    assert not bench.imports.abort(ID, Failure(Reason.CANCELLED, "gone"))


async def test_attempt_whose_reads_are_in_flight_is_not_taken_again(bench: Bench) -> None:
    await bench.reading()
    bench.requests.discard(ID)
    bench.imports.abort(ID, Failure(Reason.CANCELLED, "its router has gone"))
    again = decode_pb2.DecodeRequest()
    again.request.id.room, again.request.id.attempt = ID.room, ID.attempt
    again.source.address, again.source.fingerprint = "p:1", "f"
    with pytest.raises(MillraceError, match="submitted here before"):
        bench.role.submit(None, again)  # type: ignore[arg-type]
    assert bench.engine == [KvOffered(ID)] and bench.quarantined() == 2


async def test_import_that_ends_before_it_begins_leaves_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    bench = Bench()
    assert bench.imports.abort(ID, Failure(Reason.CANCELLED, "gone"))
    await bench.role.close()
    assert len(bench.imports) == 0 and not bench.peer.ended
    del bench
    gc.collect()
    assert [str(warning.message) for warning in recwarn if warning.category is RuntimeWarning] == []  # never awaited


async def test_failure_of_ours_is_told_at_once_while_reads_are_in_flight(bench: Bench) -> None:
    await bench.reading()
    bench.imports.on_stuck(0, ReadStuck(ID, 0))
    await settle()
    [report] = bench.peer.reports
    assert report.reader == "ours" and report.error.startswith("rank 0: a read of KV pages has not ended after")
    assert [failure.reason for failure in bench.failed] == [Reason.STALLED]
    assert bench.engine == [KvOffered(ID)]
    bench.imports.on_read_done(0, ReadDone(ID, 0, "closed", 2))
    bench.imports.on_read_done(1, ReadDone(ID, 0, "", 2))
    [failed] = bench.engine[1:]
    assert isinstance(failed, KvFailed) and failed.failure.reason == Reason.STALLED and len(bench.failed) == 1


async def test_answer_that_nobody_understands_ends_the_import(bench: Bench) -> None:
    await bench.peer.says(ValueError("a chunk that cannot be read"))
    [failed] = bench.engine
    assert isinstance(failed, KvFailed) and failed.failure.reason == Reason.INTERNAL
    assert "ValueError: a chunk that cannot be read" in failed.failure.message and len(bench.imports) == 0


async def test_broken_stream_during_reads(bench: Bench) -> None:
    await bench.reading()
    await bench.peer.says(MillraceError(Reason.WORKER_LOST, "reset"))
    assert [failure.reason for failure in bench.failed] == [Reason.WORKER_LOST]
    bench.have_read()
    assert isinstance(bench.engine[-1], KvFailed) and len(bench.imports) == 0


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
async def test_end_of_one_stream_drops_no_peer_whose_watch_lives(bench: Bench, code: grpc.StatusCode) -> None:
    """Other transfers from it go on: INTERNAL, for one, is gRPC's own where a stream ends while a message is sent."""
    await bench.reading()
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(code, nothing, nothing, details="Internal error from Core")
    await bench.peer.says(from_rpc_error(error))
    assert len(bench.failed) == 1 and not bench.peer.dropped
    assert bench.imports._peers.get("p:1", "e") is bench.peer
    assert not [message for _, message in bench.transfer if isinstance(message, DropSource)]
    bench.have_read()


async def test_end_of_the_watch_drops_the_peer(bench: Bench) -> None:
    await bench.reading()
    bench.peer.watch.set_result(True)
    await settle()
    assert bench.peer.dropped
    assert [message for _, message in bench.transfer if isinstance(message, DropSource)] == [
        DropSource(f"p{rank}") for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, Reason.TRANSFER_FAILED),
        (MillraceError(Reason.KV_EXPIRED, "too late"), Reason.KV_EXPIRED),
        (MillraceError(Reason.WORKER_LOST, "reset"), Reason.WORKER_LOST),
    ],
)
async def test_nothing_but_held_is_good(bench: Bench, answer: MillraceError | None, reason: Reason) -> None:
    bench.peer.answer = answer
    await bench.reading()
    bench.have_read()
    await settle()
    [failed] = bench.engine[1:]
    assert isinstance(failed, KvFailed) and failed.failure.reason == reason and bench.outputs == []


async def test_pages_are_reserved_while_the_prompt_is_computed(bench: Bench) -> None:
    await bench.peer.says(SOURCES, KvChunk(ID, 0, [], [], 0, False))
    assert bench.engine == [KvOffered(ID)]
    bench.imports.on_reserved(KvReserved(ID, [3, 4], 0))
    assert bench.transfer == []
    await bench.peer.says(PART)
    assert [message for _, message in bench.transfer if isinstance(message, ReadPages)] == [
        ReadPages(ID, 0, [7, 8], [3, 4], f"p{rank}") for rank in (0, 1)
    ]


async def test_nothing_is_given_back_before_anything_was_offered(bench: Bench) -> None:
    await settle()
    assert bench.imports.abort(ID, Failure(Reason.CANCELLED, "gone"))
    await settle()
    assert bench.peer.released == 0 and bench.peer.ended


async def test_read_that_fails_on_one_rank_waits_for_the_other(bench: Bench) -> None:
    await bench.reading()
    bench.imports.on_read_done(0, ReadDone(ID, 0, "endpoint lost", 2))
    assert bench.engine == [KvOffered(ID)]
    bench.imports.on_read_done(1, ReadDone(ID, 0, "", 2))
    [failed] = bench.engine[1:]
    assert failed.failure.reason == Reason.TRANSFER_FAILED and "rank 0: endpoint lost" in failed.failure.message
    await settle()
    assert bench.peer.reports == [kv_pb2.ReadFailed(reader="ours", error="rank 0: endpoint lost")]
    assert bench.failed == [] and bench.left == []


async def test_read_that_fails_on_every_rank_counts_once(bench: Bench) -> None:
    """With many ranks one lost source would else be taken for a broken transport of ours."""
    await bench.reading()
    for rank in range(2):
        bench.imports.on_stuck(rank, ReadStuck(ID, 0))
    for rank in range(2):
        bench.imports.on_read_done(rank, ReadDone(ID, 0, "no route", 2))
    assert bench.imports._failed_reads.total == 1


async def test_source_is_connected_once(bench: Bench) -> None:
    await bench.reading()
    bench.transfer.clear()
    for rank, source in enumerate(SOURCES):
        bench.imports._connect(bench.peer, rank, source)  # type: ignore[arg-type]
    assert bench.transfer == [] and len(bench.peer.agents) == 2


async def test_peer_that_was_dropped_meanwhile_gets_no_connection(bench: Bench) -> None:
    """Nobody would end it. A read fails, as its source is unknown to the rank."""
    bench.peer.dropped = True
    bench.imports._connect(bench.peer, 0, SOURCES[0])  # type: ignore[arg-type]
    assert bench.transfer == [] and not bench.peer.agents
