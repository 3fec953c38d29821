"""The importing side of a worker: carries out the actions of each request's KvImport (transfer/importer.py). What
imports of whole prompts are for is here (`WholePrompts`); for prefix fetches it is in prefix_fetches.py.

Life of an import:

1. `start`     a task opens Fetch on the prefill worker and hands its chunks to the state machine
2. the machine asks: AskReserve -> KvOffered to the engine; ReadPages -> every rank of the replica;
   AskRelease -> release on the Fetch stream
3. answers come back through `on_reserved`, `on_read_done`, `on_stuck` and the stream; every failure comes as `on_abort`
4. Done -> KvArrived, Over -> KvFailed, and the import is forgotten; both only when no read is in flight. A stream on
   which release was sent ends by itself, any other is cut

While reads of a failed import are still in flight its pages are in quarantine: the router gets the failure at once,
the engine gets its KvFailed later.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from millrace.v1 import kv_pb2, worker_pb2
from millrace_common.log import PER_REQUEST
from millrace_common.page_hash import page_hashes
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_serve.engine.core import (
    Failure,
    KvArrived,
    KvChunk,
    KvFailed,
    KvOffered,
    KvReserved,
    Request,
    RequestId,
    SequenceOutput,
)
from millrace_serve.handover.failed_reads import FailedReads
from millrace_serve.handover.peers import Fetch, Peer, Peers
from millrace_serve.transfer.base import MemoryHandle
from millrace_serve.transfer.importer import Action, AskRelease, AskReserve, Done, ImportState, KvImport, Over
from millrace_serve.transfer.messages import AddSource, ReadDone, ReadPages, ReadStuck
from millrace_serve.worker.frontend.frontend import Frontend

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PostedRead:
    num_pages: int
    pending: set[int]  # ranks that have not finished it
    posted_at: float
    took_s: float = 0.0  # when it is over
    error: str = ""  # of a rank
    corrupt: bool = False  # on a rank


@dataclass(slots=True)
class Import:
    """One request's import: its state machine, and the data needed to carry out its actions."""

    machine: KvImport
    use: "ImportUse"
    replica: int
    peer: Peer
    sources: list[MemoryHandle] = field(default_factory=list)  # by tensor-parallel rank of the exporter
    reads: dict[int, PostedRead] = field(default_factory=dict)  # by number
    last_chunk_at: float = 0.0
    told: bool = False  # the router has the end of the attempt, or will get it from the engine
    fetch: Fetch | None = None
    task: asyncio.Task[None] | None = None
    released: bool = False  # release was sent
    failures_before: int = 0  # FailedReads.total when it began
    connects: bool = False  # it is the first one from this peer
    prefix: kv_pb2.FetchPrefix | None = None  # of a prefix fetch

    @property
    def num_read(self) -> int:
        """Pages."""
        return sum(read.num_pages for read in self.reads.values())


class ImportUse(Protocol):
    """What imports are for: how the engine and others hear of each stage."""

    def offered(self, job: Import) -> None:
        """The first chunk is here: ask the engine for pages."""

    def reserved(self, job: Import) -> None:
        """The engine has pages."""

    def done(self, job: Import, first: SequenceOutput | None) -> None:
        """All pages are here."""

    def given_up(self, job: Import, failure: Failure) -> None:
        """It has failed, and reads into its pages are still in flight."""

    def over(self, job: Import) -> None:
        """Nothing of it is left; `job.machine.failure` says how it ended."""


class Imports:
    def __init__(self, frontend: Frontend, peers: Peers, failed_reads: FailedReads) -> None:
        self._whole = WholePrompts(frontend)
        self._page_size = frontend.config.limits.page_size
        # a Fetch stream that is silent for so long, or a read that takes longer, ends an import
        self._stall_s = frontend.config.timeouts.stall
        self._ranks = frontend.ranks
        self._requests = frontend.requests
        self._peers = peers
        self._spans = frontend.spans
        self._metrics = frontend.metrics
        self._board = frontend.board
        self._failed_reads = failed_reads
        self._epoch = frontend.epoch
        self._live: dict[RequestId, Import] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, id: RequestId) -> bool:
        return id in self._live

    def start(self, request: Request, replica: int, source: worker_pb2.KvSourceRef) -> None:
        hashes = page_hashes(request.token_ids, self._page_size, salt=request.cache_salt)
        peer = self._peers.get(source.address, source.epoch)
        self.begin(Import(KvImport(request.id, hashes), self._whole, replica, peer))

    def abort(self, id: RequestId, failure: Failure) -> bool:
        """False: there is no such import."""
        job = self._live.get(id)
        if job is None:
            return False
        job.told = job.told or job.prefix is None  # of a prefix fetch the engine must hear that reads are in flight
        self.fail(job, failure)
        return True

    def fail(self, job: Import, failure: Failure) -> None:
        self._do(job, job.machine.on_abort(failure))

    def begin(self, job: Import) -> None:
        self._live[job.machine.id] = job
        job.failures_before = self._failed_reads.total
        job.task = self._run(self._to_the_end(job, lambda: self._fetch(job)))

    def on_reserved(self, reserved: KvReserved) -> None:
        self._spans.has_pages(reserved.id)
        if job := self._live.get(reserved.id):
            job.use.reserved(job)
            self._do(job, job.machine.on_reserved(reserved.page_ids, reserved.num_cached_pages))
        else:
            self._requests.count_stale("reserved")

    def on_read_done(self, rank: int, done: ReadDone) -> None:
        """A read is over when it is over on every rank of the replica."""
        job = self._live.get(done.id)
        read = job.reads.get(done.read) if job else None
        if job is None or read is None or rank not in read.pending:
            self._requests.count_stale("read")
            return
        read.pending.remove(rank)
        if done.error:
            read.error, read.corrupt = f"rank {rank}: {done.error}", read.corrupt or done.corrupt
            self._report(job, read.error)
        else:
            self._metrics.kv_bytes.inc(done.num_pages * self._ranks.ready_info.layout.page_bytes)
        if read.pending:
            return
        read.took_s = time.monotonic() - read.posted_at
        self._metrics.kv_read.observe(read.took_s)
        if not read.error:
            self._failed_reads.succeeded()
            self._board.reads.add(read.num_pages * self._ranks.ready_info.layout.page_bytes, read.took_s)
        self._do(job, job.machine.on_read_done(done.read, read.error, read.corrupt))

    def on_stuck(self, rank: int, stuck: ReadStuck) -> None:
        if job := self._live.get(stuck.id):
            message = f"a read of KV pages has not ended after {self._stall_s:g} s"
            self._report(job, f"rank {rank}: {message}")
            self.fail(job, Failure(Reason.STALLED, message))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _do(self, job: Import, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case AskReserve():
                    job.use.offered(job)
                case ReadPages():
                    self._read(job, action)
                case AskRelease():
                    assert job.fetch is not None, "released before anything came"
                    job.released = True
                    self._run(self._to_the_end(job, job.fetch.release))
                case Done(first):
                    job.use.done(job, first)
                    self._forget(job)
                case Over(failure):
                    self._ranks.send(job.replica, KvFailed(job.machine.id, failure))
                    self._forget(job)
        if job.machine.state is ImportState.DRAINING and job.machine.failure and not job.told:
            job.use.given_up(job, job.machine.failure)
        draining = (job for job in self._live.values() if job.machine.state is ImportState.DRAINING)
        pages = sum(read.num_pages for job in draining for read in job.reads.values() if read.pending)
        self._metrics.quarantined.set(pages)

    def _report(self, job: Import, error: str) -> None:
        """Tell the peer that its pages could not be read. Failed prefix fetches do not count: their prompts are
        computed.
        """
        assert job.fetch is not None
        self._run(job.fetch.failed(kv_pb2.ReadFailed(reader=self._epoch, error=error)))
        if job.prefix is None:
            self._failed_reads.failed(job.peer.address, job.failures_before, f"worker {job.peer.address}: {error}")

    def _read(self, job: Import, read: ReadPages) -> None:
        """Rank i reads from the exporter's rank i, modulo their number: the KV is the same on all of them."""
        ranks = self._ranks.of_replica(job.replica)
        job.reads[read.read] = PostedRead(len(read.dst_pages), set(ranks), time.monotonic())
        for index, rank in enumerate(ranks):
            source = job.sources[index % len(job.sources)]
            job.connects |= self._connect(job.peer, rank, source)
            self._ranks.send_reader(rank, msgspec.structs.replace(read, agent=source.agent))

    def _connect(self, peer: Peer, rank: int, source: MemoryHandle) -> bool:
        """Have a rank connect to the source, and return whether it did not know it. A peer that was dropped gets no
        connection: nobody would end it.
        """
        if peer.dropped or (rank, source.agent) in peer.agents:
            return False
        peer.agents.add((rank, source.agent))
        self._ranks.send_reader(rank, AddSource(source))
        return True

    def _forget(self, job: Import) -> None:
        del self._live[job.machine.id]
        job.use.over(job)
        if failure := job.machine.failure:
            message = "kv import %s failed: %s: %s"
            log.info(message, job.machine.id, failure.reason, failure.message, extra=PER_REQUEST)
        for refusal, count in job.machine.refused.items():
            self._metrics.worker_stale.labels(kind=refusal).inc(count)
        if job.task is not None and not job.released:
            job.task.cancel()

    async def _fetch(self, job: Import) -> None:
        machine = job.machine
        job.fetch = job.peer.fetch(machine.id, self._ranks.ready_info.layout.fingerprint, self._stall_s, job.prefix)
        async with contextlib.aclosing(job.fetch.items()) as items:
            async for item in items:
                match item:
                    case KvChunk():
                        if item.page_ids and not job.sources:
                            raise MillraceError(Reason.TRANSFER_FAILED, "it told of pages before their memory")
                        job.last_chunk_at = time.monotonic()
                        self._do(job, machine.on_chunk(item))
                    case kv_pb2.ReleaseConfirmed():
                        self._do(job, machine.on_release_confirmed())
                    case sources:
                        self._peers.answered(job.peer)
                        job.sources = sources
        self._do(job, machine.on_stream_end())

    async def _to_the_end(self, job: Import, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Runs `work`; every error in it ends the import, because nothing else would."""
        try:
            await work()
        except Exception as failure:
            error = MillraceError.of(failure, log, "kv import %s: unexpected error", job.machine.id)
            if error.reason is Reason.EPOCH_CHANGED:  # the watch may never have met the epoch, nor miss it
                self._peers.drop(job.peer)
            self.fail(job, Failure(error.reason, f"worker {job.peer.address}: {error.message}"))

    def _run(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class WholePrompts(ImportUse):
    """The KV of whole prompts, to go on with."""

    def __init__(self, frontend: Frontend) -> None:
        self._ranks, self._requests = frontend.ranks, frontend.requests
        self._metrics, self._spans = frontend.metrics, frontend.spans

    def offered(self, job: Import) -> None:
        self._spans.waits_for_pages(job.machine.id)
        self._ranks.send(job.replica, KvOffered(job.machine.id))

    def reserved(self, job: Import) -> None:
        pass

    def done(self, job: Import, first: SequenceOutput | None) -> None:
        id = job.machine.id
        assert first is not None, f"import {id} ended without a first token"
        self._metrics.kv_transfer.observe(time.monotonic() - job.last_chunk_at)
        self._spans.imported(id, job.num_read)
        self._ranks.send(job.replica, KvArrived(id, first))
        if id in self._requests:  # the engine sends everything after the first token, and the end
            self._requests.deliver([msgspec.structs.replace(first, finish=None)])

    def given_up(self, job: Import, failure: Failure) -> None:
        self._requests.fail(job.machine.id, failure)

    def over(self, job: Import) -> None:
        if failure := job.machine.failure:
            self._metrics.kv_failures.labels(reason=failure.reason).inc()
