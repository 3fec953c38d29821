"""The exporting side of a prefill worker: the published parts of each prompt, its Fetch streams, and its lease.

Life of an export:

1. `expect`   the engine gets the prompt
2. `publish`  parts come from the engine; every Fetch stream of the attempt gets all of them in order, whenever it
   was opened
3. the end, by the lease (transfer/lease.py): released, expired or aborted; or by `fail`, when the prompt failed. The
   engine gets LeaseEnded, and Fetch streams end: normally after a release, else with the reason.

A Fetch may come before 1: it waits. Ended attempts are remembered for a while, for late Fetches.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import AsyncIterator, Callable

from millrace_common.metrics import Metrics
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_serve.engine.core import KvPart, LeaseEnded, RequestId
from millrace_serve.transfer.lease import LeaseConfig, LeaseState, LeaseTable, Outcome
from millrace_serve.worker.config import Timeouts
from millrace_serve.worker.frontend.wakeup import Wakeup

log = logging.getLogger(__name__)

MAX_ENDED = 65536
_END: dict[LeaseState, tuple[Reason, str] | None] = {
    LeaseState.RELEASED: None,
    LeaseState.EXPIRED: (Reason.KV_EXPIRED, "the lease of this attempt's pages expired"),
    LeaseState.ABORTED: (Reason.CANCELLED, "the attempt was aborted on the prefill worker"),
}


class Export:
    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.parts: list[KvPart] = []  # for Fetches
        self.error: tuple[Reason, str] | None = None  # the reason that ends Fetches
        self.changed = Wakeup()


class Exports:
    """`end_lease(replica, message)` reaches the engine."""

    def __init__(self, timeouts: Timeouts, metrics: Metrics, end_lease: Callable[[int, LeaseEnded], None]) -> None:
        loop = asyncio.get_running_loop()
        config = LeaseConfig(lease_s=timeouts.lease, max_lease_s=timeouts.max_lease)
        self.leases = LeaseTable(config, loop.time, self._on_ended)
        self._timeouts = timeouts
        self._metrics = metrics
        self._end_lease = end_lease
        self._live: dict[RequestId, Export] = {}
        self._ended: collections.OrderedDict[RequestId, Export] = collections.OrderedDict()
        self._expected = Wakeup()  # fires when an attempt is added
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, id: RequestId) -> bool:
        return id in self._live or id in self._ended

    def expect(self, id: RequestId, replica: int) -> None:
        self._live[id] = Export(replica)
        self._expected.fire()

    def publish(self, replica: int, part: KvPart) -> None:
        export = self._live.get(part.id)
        if part.first is not None and part.first.finish is not None and export is not None:
            self._finish(part, export)
            return
        if not self.leases.publish(part):  # it was aborted meanwhile: the pages may be reused
            self._end_lease(replica, LeaseEnded(part.id))
            return
        self._metrics.leases.set(self.leases.num_live)
        if export is not None:
            export.parts.append(part)
            export.changed.fire()
        if part.last and self._timer is None:
            self._arm()

    def release(self, id: RequestId) -> Outcome:
        return self.leases.release(id)

    def abort(self, id: RequestId) -> bool:
        """The router aborted the attempt. False: nothing is held for it."""
        if id not in self._live:
            return False
        self.leases.abort(id)
        self._end(id, _END[LeaseState.ABORTED])
        return True

    def fail(self, id: RequestId, error: MillraceError) -> None:
        """End the export of a prompt that failed in the engine."""
        if id in self._live:
            self._end(id, (error.reason, error.message))
            self.leases.abort(id)

    def fail_all(self, error: MillraceError) -> None:
        for id in list(self._live):
            self.fail(id, error)
        self._expected.fire()

    async def fetch(self, id: RequestId) -> AsyncIterator[Export | KvPart | None]:
        """Yield the export, then its parts as they come; None after a heartbeat's time without one. Ends when the lease
        is released; raises MillraceError for every other end, and KV_NOT_FOUND for an attempt that does not come.
        """
        deadline = asyncio.get_running_loop().time() + self._timeouts.fetch_wait
        while (export := self._live.get(id) or self._ended.get(id)) is None:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                waited = f"not submitted within fetch_wait={self._timeouts.fetch_wait:g} s"
                raise MillraceError(Reason.KV_NOT_FOUND, f"{id} is unknown: {waited}")
            if not await self._expected.wait(min(left, self._timeouts.heartbeat)):
                yield None
        yield export
        if id in self._ended and not export.error and not export.parts:
            raise MillraceError(Reason.KV_NOT_FOUND, f"{id} was released before")
        num_sent = 0
        while True:
            if num_sent < len(export.parts):
                num_sent += 1
                yield export.parts[num_sent - 1]
            elif id not in self._live:
                break
            elif not await export.changed.wait(self._timeouts.heartbeat):
                self.leases.renew(id)
                yield None
        if export.error is not None:
            raise MillraceError(*export.error)

    def _on_ended(self, id: RequestId, state: LeaseState) -> None:
        self._metrics.leases_ended.labels(outcome=state).inc()
        self._metrics.leases.set(self.leases.num_live)
        self._end(id, _END[state])

    def _finish(self, part: KvPart, export: Export) -> None:
        """The first token ended the sequence. Its pages are released now; a Fetch still gets the part, however late."""
        parts = [*export.parts, part]
        self._end(part.id, None)
        export.parts = parts
        self.leases.abort(part.id)

    def _end(self, id: RequestId, error: tuple[Reason, str] | None) -> None:
        export = self._live.pop(id, None)
        if export is None:
            return
        export.error = error
        export.parts = []
        self._ended[id] = export
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        export.changed.fire()
        self._end_lease(export.replica, LeaseEnded(id))

    def _expire(self) -> None:
        self._timer = None
        self.leases.expire()
        self._arm()

    def _arm(self) -> None:
        """Set the timer to the earliest deadline. After a renewal it fires early, which is harmless."""
        if (deadline := self.leases.next_deadline()) is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._expire)
