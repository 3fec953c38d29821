"""The leases of exported prompts, and the answers to Release. Pure: no I/O, one thread, a given clock.

Life of one lease, keyed by (room, attempt):

1. OPEN       the first KvPart was published; the sequence still computes and its pages belong to it: no deadline runs.
2. PUBLISHED  the last part was published; the pages are parked and a deadline runs, pushed forward by `renew` up to a
              maximum.
3. RELEASED   the importer released in time (HELD): its reads saw pages that were not reused.
   EXPIRED    the deadline passed first.
   ABORTED    the router stopped the request (in either state, or before its first part), or the importer gave it up
              while it was still open.

Entering a terminal state calls `on_ended` once: that call is what lets the pages be reused, and HELD is never answered
for the first time after it. A terminal lease leaves a tombstone, so that a repeated Release gets the same answer
and a late part of an ended lease is refused instead of opening a new one. Tombstones are bounded by age and count;
without one the answer is UNKNOWN.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable

import msgspec
from millrace_common.transitions import Transitions

from millrace_serve.engine.core import KvPart, RequestId


class LeaseState(enum.StrEnum):
    OPEN = "open"
    PUBLISHED = "published"
    RELEASED = "released"
    EXPIRED = "expired"
    ABORTED = "aborted"


class Outcome(enum.StrEnum):
    HELD = "held"  # the pages were not reused before this answer: what was read from them is good
    EXPIRED = "expired"  # the lease ended otherwise: discard what was read
    UNKNOWN = "unknown"  # never published here, or forgotten: discard what was read


MOVES = Transitions(
    {
        LeaseState.OPEN: (LeaseState.PUBLISHED, LeaseState.ABORTED),
        LeaseState.PUBLISHED: (LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.ABORTED),
        LeaseState.RELEASED: (),
        LeaseState.EXPIRED: (),
        LeaseState.ABORTED: (),
    }
)


class LeaseConfig(msgspec.Struct, frozen=True, kw_only=True):
    lease_s: float = 30.0  # from the last part or the last renewal
    max_lease_s: float = 300.0  # from the last part, whatever is renewed
    tombstone_s: float = 600.0
    max_tombstones: int = 65536


class _Lease(msgspec.Struct):
    state: LeaseState
    deadline: float = 0.0  # of PUBLISHED
    last_deadline: float = 0.0  # renewals never go beyond


class LeaseTable:
    """The leases of one replica.

    `on_ended(id, state)` is called exactly once per lease, and from then on its pages may be reused. With ABORTED the
    sequence may still be computing, and has to be stopped as well.
    """

    def __init__(
        self, config: LeaseConfig, clock: Callable[[], float], on_ended: Callable[[RequestId, LeaseState], None]
    ) -> None:
        self._config = config
        self._clock = clock
        self._on_ended = on_ended
        self._live: dict[RequestId, _Lease] = {}
        self._ended: collections.OrderedDict[RequestId, tuple[LeaseState, float]] = collections.OrderedDict()

    def publish(self, part: KvPart) -> bool:
        """Adds a part; the first opens the lease. False: the lease has ended or is complete, the part is refused."""
        if part.id in self._ended:
            return False
        lease = self._live.setdefault(part.id, _Lease(LeaseState.OPEN))
        if lease.state is not LeaseState.OPEN:
            return False
        if part.last:
            now = self._clock()
            lease.state = MOVES.move(lease.state, LeaseState.PUBLISHED, f"lease {part.id}")
            lease.last_deadline = now + self._config.max_lease_s
            lease.deadline = min(now + self._config.lease_s, lease.last_deadline)
        return True

    def renew(self, id: RequestId) -> bool:
        """The importer is alive and still reading. False: there is no live lease to renew."""
        lease = self._live.get(id)
        if lease is None:
            return False
        lease.deadline = min(self._clock() + self._config.lease_s, lease.last_deadline)
        return True

    def release(self, id: RequestId) -> Outcome:
        """Idempotent. A deadline that has passed but was not swept yet is still held: the pages were not given back."""
        state = self.state(id)
        if state is None:
            return Outcome.UNKNOWN
        if state is LeaseState.PUBLISHED:
            self._end(id, LeaseState.RELEASED)
        elif state is LeaseState.OPEN:
            self._end(id, LeaseState.ABORTED)
        return Outcome.HELD if state in (LeaseState.PUBLISHED, LeaseState.RELEASED) else Outcome.EXPIRED

    def abort(self, id: RequestId) -> None:
        """End a lease. An unknown id is recorded too, so that a part that is still on its way does not open a lease."""
        if id not in self._ended:
            self._end(id, LeaseState.ABORTED)

    def expire(self) -> None:
        """Ends every lease whose deadline has passed, and forgets old tombstones."""
        now = self._clock()
        due = [id for id, x in self._live.items() if x.state is LeaseState.PUBLISHED and x.deadline <= now]
        for id in due:
            self._end(id, LeaseState.EXPIRED)
        self._forget(now)

    def state(self, id: RequestId) -> LeaseState | None:
        if lease := self._live.get(id):
            return lease.state
        tombstone = self._ended.get(id)
        return tombstone[0] if tombstone else None

    def next_deadline(self) -> float | None:
        """The time at which `expire` next has a lease to end, on the table's clock."""
        return min((x.deadline for x in self._live.values() if x.state is LeaseState.PUBLISHED), default=None)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def _end(self, id: RequestId, to: LeaseState) -> None:
        lease = self._live.pop(id, None)
        now = self._clock()
        self._ended[id] = (MOVES.move(lease.state, to, f"lease {id}") if lease else to, now)
        self._forget(now)
        if lease:
            self._on_ended(id, to)

    def _forget(self, now: float) -> None:
        oldest_kept = now - self._config.tombstone_s
        while self._ended:
            _, ended_at = next(iter(self._ended.values()))
            if ended_at > oldest_kept and len(self._ended) <= self._config.max_tombstones:
                return
            self._ended.popitem(last=False)
