"""The exporting side of a worker: the published chunks of each prompt, its Fetch streams, and its lease; and the same
of prefix fetches, cached pages that another worker wants.

Life of an export:

1. `expect`   the engine gets the prompt
2. `publish`  chunks come from the engine; every Fetch stream of the attempt gets all of them in order, whenever it
   was opened
3. the end, by the lease (transfer/lease.py): released, expired or aborted; or by `fail`, when the prompt failed. The
   engine gets LeaseEnded, and Fetch streams end: normally after a release, else with the reason.

A Fetch may come before 1: it waits. Ended attempts are remembered for a while, for late Fetches.

A prefix fetch (`serve_prefix`) belongs to the one Fetch that asked for it and ends with it. It has one chunk, the last
one, and a lease that nothing renews. Without pages nothing is held.
"""

import asyncio
import collections
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from millrace_common.metrics import Metrics
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_serve.engine.core import Failure, KvChunk, LeaseEnded, RequestId, ServePrefix
from millrace_serve.transfer.lease import LeaseEnd, LeaseTable
from millrace_serve.worker.config import WorkerTimeouts
from millrace_serve.worker.frontend.wakeup import Wakeup

log = logging.getLogger(__name__)

MAX_ENDED = 65536
MAX_FINISHED = 256  # of these with their chunks: some 100 bytes for each page of a prompt
PREFIX_ROOM = 0  # which no request has
_END: dict[LeaseEnd, Failure | None] = {
    LeaseEnd.RELEASED: None,
    LeaseEnd.EXPIRED: Failure(Reason.KV_EXPIRED, "the lease of this attempt's pages expired"),
    LeaseEnd.ABORTED: Failure(Reason.CANCELLED, "the decode worker released the lease before the last chunk"),
}


class Export:
    def __init__(self, replica: int, prefix_fetch: bool = False) -> None:
        self.replica = replica
        self.prefix_fetch = prefix_fetch
        self.chunks: list[KvChunk] = []  # for Fetches
        self.failure: Failure | None = None  # that ends Fetches
        self.changed = Wakeup()


class Exports:
    """`send(replica, message)` reaches the engine."""

    def __init__(
        self, timeouts: WorkerTimeouts, metrics: Metrics, send: Callable[[int, LeaseEnded | ServePrefix], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.leases = LeaseTable(timeouts.lease, 10 * timeouts.lease, loop.time, self._on_ended)  # renewals included
        self._timeouts = timeouts
        self._metrics = metrics
        self._send = send
        self._prefix_fetches = itertools.count()
        self._live: dict[RequestId, Export] = {}
        self._ended: collections.OrderedDict[RequestId, Export] = collections.OrderedDict()
        self._finished: collections.deque[Export] = collections.deque()  # that have chunks for late Fetches
        self._expected = Wakeup()  # fires when an attempt is added
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, id: RequestId) -> bool:
        return id in self._live or id in self._ended

    def expect(self, id: RequestId, replica: int) -> None:
        self._live[id] = Export(replica)
        self._expected.fire()

    def serve_prefix(self, replica: int, blocks: list[bytes]) -> RequestId:
        """Ask an engine for cached pages. Returns the prefix fetch's id, for `fetch`."""
        id = RequestId(PREFIX_ROOM, next(self._prefix_fetches))
        self._live[id] = Export(replica, prefix_fetch=True)
        self._send(replica, ServePrefix(id, blocks))
        return id

    def publish(self, replica: int, chunk: KvChunk) -> None:
        export = self._live.get(chunk.id)
        if export is None:  # it was aborted meanwhile: the pages may be reused
            self._send(replica, LeaseEnded(chunk.id))
            return
        if chunk.last and (not chunk.page_ids or (chunk.first is not None and chunk.first.finish is not None)):
            self._finish(chunk, export)
            return
        if export.prefix_fetch:
            self._metrics.prefix_fetch_pages.labels(direction="served").inc(len(chunk.page_ids))
        self.leases.publish(chunk)
        self._metrics.leases.set(self.leases.num_live)
        export.chunks.append(chunk)
        export.changed.fire()
        if chunk.last and self._timer is None:
            self._arm()

    def fail(self, id: RequestId, failure: Failure) -> bool:
        """The attempt is over before its pages were read, or the fetching worker has gone. Readers get `failure`, which
        tells routers whether another attempt may help. False: nothing is held for it.
        """
        if id not in self._live:
            return False
        self._end(id, failure)
        self.leases.abort(id)
        return True

    def fail_all(self, failure: Failure) -> None:
        for id in list(self._live):
            self.fail(id, failure)

    async def fetch(self, id: RequestId) -> AsyncIterator[Export | KvChunk | None]:
        """Yield the export, then its chunks as they come; None after a heartbeat's time without one. Ends when the
        lease is released; raises MillraceError for every other end, and KV_NOT_FOUND for an attempt that does not come.
        """
        deadline = asyncio.get_running_loop().time() + self._timeouts.fetch_wait
        while (export := self._live.get(id) or self._ended.get(id)) is None:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                waited = f"not submitted within {self._timeouts.fetch_wait:g} s"
                raise MillraceError(Reason.KV_NOT_FOUND, f"{id} is unknown: {waited}")
            if not await self._expected.wait(min(left, self._timeouts.heartbeat)):
                yield None
        yield export
        if id in self._ended and not export.failure and not export.chunks:
            raise MillraceError(Reason.KV_NOT_FOUND, f"{id} was released before")
        num_sent = 0
        while True:
            if num_sent < len(export.chunks):
                num_sent += 1
                yield export.chunks[num_sent - 1]
            elif id not in self._live:
                break
            elif not await export.changed.wait(self._timeouts.heartbeat):
                if not export.prefix_fetch:
                    self.leases.renew(id)
                yield None
        if export.failure is not None:
            raise MillraceError(export.failure.reason, export.failure.message)

    def _on_ended(self, id: RequestId, end: LeaseEnd) -> None:
        self._metrics.leases_ended.labels(outcome=end).inc()
        self._metrics.leases.set(self.leases.num_live)
        self._end(id, _END[end])

    def _finish(self, chunk: KvChunk, export: Export) -> None:
        """The first token ended the sequence, or nothing is served. Its pages are released now; a late Fetch still gets
        the chunk, unless many finished meanwhile: nobody fetches requests of one token.
        """
        self._end(chunk.id, None, [*export.chunks, chunk])
        self._finished.append(export)
        if len(self._finished) > MAX_FINISHED:
            self._finished.popleft().chunks = []
        self.leases.abort(chunk.id)

    def _end(self, id: RequestId, failure: Failure | None, chunks: Sequence[KvChunk] = ()) -> None:
        export = self._live.pop(id, None)
        if export is None:
            return
        export.failure, export.chunks = failure, list(chunks)
        if not export.prefix_fetch:
            self._ended[id] = export
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        export.changed.fire()
        self._send(export.replica, LeaseEnded(id))

    def _expire(self) -> None:
        self._timer = None
        self.leases.expire()
        self._arm()

    def _arm(self) -> None:
        """Set the timer to the earliest deadline. After a renewal it fires early, which is harmless."""
        if (deadline := self.leases.next_deadline()) is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._expire)
