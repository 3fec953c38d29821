"""The exporting side of a worker: the published parts of each prompt, its Fetch streams, and its lease; and the same of
loans, cached pages that another worker wants.

Life of an export:

1. `expect`   the engine gets the prompt
2. `publish`  parts come from the engine; every Fetch stream of the attempt gets all of them in order, whenever it
   was opened
3. the end, by the lease (transfer/lease.py): released, expired or aborted; or by `fail`, when the prompt failed. The
   engine gets LeaseEnded, and Fetch streams end: normally after a release, else with the reason.

A Fetch may come before 1: it waits. Ended attempts are remembered for a while, for late Fetches.

A loan (`lend`) belongs to the one Fetch that asked for it and ends with it. It has one part, the last one, and a lease
that nothing renews. Without pages nothing is held.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
from collections.abc import AsyncIterator, Callable

from millrace_common.metrics import Metrics
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_serve.engine.core import Failure, KvPart, LeaseEnded, Lend, RequestId
from millrace_serve.transfer.lease import LeaseEnd, LeaseTable
from millrace_serve.worker.config import WorkerTimeouts
from millrace_serve.worker.frontend.wakeup import Wakeup

log = logging.getLogger(__name__)

MAX_ENDED = 65536
LOAN_ROOM = 0  # which no request has
_END: dict[LeaseEnd, Failure | None] = {
    LeaseEnd.RELEASED: None,
    LeaseEnd.EXPIRED: Failure(Reason.KV_EXPIRED, "the lease of this attempt's pages expired"),
    LeaseEnd.ABORTED: Failure(Reason.CANCELLED, "the reader gave the lease up before the last part"),
}


class Export:
    def __init__(self, replica: int, loan: bool = False) -> None:
        self.replica = replica
        self.loan = loan
        self.parts: list[KvPart] = []  # for Fetches
        self.failure: Failure | None = None  # that ends Fetches
        self.changed = Wakeup()


class Exports:
    """`send(replica, message)` reaches the engine."""

    def __init__(
        self, timeouts: WorkerTimeouts, metrics: Metrics, send: Callable[[int, LeaseEnded | Lend], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.leases = LeaseTable(timeouts.lease, timeouts.max_lease, loop.time, self._on_ended)
        self._timeouts = timeouts
        self._metrics = metrics
        self._send = send
        self._loans = itertools.count()
        self._live: dict[RequestId, Export] = {}
        self._ended: collections.OrderedDict[RequestId, Export] = collections.OrderedDict()
        self._expected = Wakeup()  # fires when an attempt is added
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, id: RequestId) -> bool:
        return id in self._live or id in self._ended

    def expect(self, id: RequestId, replica: int) -> None:
        self._live[id] = Export(replica)
        self._expected.fire()

    def lend(self, replica: int, blocks: list[bytes]) -> RequestId:
        """Ask an engine for cached pages. Returns the loan's id, for `fetch`."""
        id = RequestId(LOAN_ROOM, next(self._loans))
        self._live[id] = Export(replica, loan=True)
        self._send(replica, Lend(id, blocks))
        return id

    def publish(self, replica: int, part: KvPart) -> None:
        export = self._live.get(part.id)
        if export is None:  # it was aborted meanwhile: the pages may be reused
            self._send(replica, LeaseEnded(part.id))
            return
        if part.last and (not part.page_ids or (part.first is not None and part.first.finish is not None)):
            self._finish(part, export)
            return
        if export.loan:
            self._metrics.loan_pages.labels(direction="lent").inc(len(part.page_ids))
        self.leases.publish(part)
        self._metrics.leases.set(self.leases.num_live)
        export.parts.append(part)
        export.changed.fire()
        if part.last and self._timer is None:
            self._arm()

    def fail(self, id: RequestId, failure: Failure) -> bool:
        """The attempt is over before its pages were read, or the borrower has gone. Readers get `failure`, which tells
        routers whether another attempt may help. False: nothing is held for it.
        """
        if id not in self._live:
            return False
        self._end(id, failure)
        self.leases.abort(id)
        return True

    def fail_all(self, failure: Failure) -> None:
        for id in list(self._live):
            self.fail(id, failure)

    async def fetch(self, id: RequestId) -> AsyncIterator[Export | KvPart | None]:
        """Yield the export, then its parts as they come; None after a heartbeat's time without one. Ends when the lease
        is released; raises MillraceError for every other end, and KV_NOT_FOUND for an attempt that does not come.
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
        if id in self._ended and not export.failure and not export.parts:
            raise MillraceError(Reason.KV_NOT_FOUND, f"{id} was released before")
        num_sent = 0
        while True:
            if num_sent < len(export.parts):
                num_sent += 1
                yield export.parts[num_sent - 1]
            elif id not in self._live:
                break
            elif not await export.changed.wait(self._timeouts.heartbeat):
                if not export.loan:
                    self.leases.renew(id)
                yield None
        if export.failure is not None:
            raise MillraceError(export.failure.reason, export.failure.message)

    def _on_ended(self, id: RequestId, end: LeaseEnd) -> None:
        self._metrics.leases_ended.labels(outcome=end).inc()
        self._metrics.leases.set(self.leases.num_live)
        self._end(id, _END[end])

    def _finish(self, part: KvPart, export: Export) -> None:
        """The first token ended the sequence, or nothing is lent. Its pages are released now; a Fetch still gets the
        part, however late.
        """
        parts = [*export.parts, part]
        self._end(part.id, None)
        export.parts = parts
        self.leases.abort(part.id)

    def _end(self, id: RequestId, failure: Failure | None) -> None:
        export = self._live.pop(id, None)
        if export is None:
            return
        export.failure = failure
        export.parts = []
        if not export.loan:
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
