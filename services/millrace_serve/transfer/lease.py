"""The leases of exported prompts, and the answers to Release. Pure: no I/O, one thread, a given clock.

A lease is open from the first KvChunk on, published with the last; docs/explanation/kv-transfer.md has the states.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from millrace_serve.engine.core import KvChunk, RequestId


class LeaseEnd(enum.StrEnum):
    RELEASED = "released"  # the importer released in time (held): its reads saw pages that were not reused
    EXPIRED = "expired"  # the deadline passed first
    ABORTED = "aborted"  # the router stopped the request, or the importer gave it up while the lease was still open


@dataclass(slots=True)
class _Deadline:
    at: float
    last: float  # renewals never go beyond


class LeaseTable:
    """The leases of one replica. Times are in seconds, on `clock`.

    `on_ended(id, end)` is called exactly once per lease, and from then on its pages may be reused. With ABORTED the
    sequence may still be computing, and has to be stopped as well.
    """

    def __init__(
        self,
        lease_s: float,
        max_lease_s: float,
        clock: Callable[[], float],
        on_ended: Callable[[RequestId, LeaseEnd], None],
    ) -> None:
        """A lease runs for `lease_s` from the last chunk or renewal, for `max_lease_s` from the last chunk at most."""
        self._lease_s = lease_s
        self._max_lease_s = max_lease_s
        self._clock = clock
        self._on_ended = on_ended
        self._open: set[RequestId] = set()
        self._published: dict[RequestId, _Deadline] = {}

    def publish(self, chunk: KvChunk) -> None:
        """Add a chunk of a prompt whose lease has not ended: the first opens the lease, the last completes it."""
        if chunk.last:
            self._open.discard(chunk.id)
            now = self._clock()
            last = now + self._max_lease_s
            self._published[chunk.id] = _Deadline(min(now + self._lease_s, last), last)
        else:
            self._open.add(chunk.id)

    def renew(self, id: RequestId) -> None:
        """The importer is alive and still reading."""
        if deadline := self._published.get(id):
            deadline.at = min(self._clock() + self._lease_s, deadline.last)

    def release(self, id: RequestId) -> bool:
        """End a lease for its importer. True, held: the pages were not reused before, so what was read from them is
        good. A deadline that has passed but was not swept yet is held too: the pages were not given back.
        """
        held = id in self._published
        self._end(id, LeaseEnd.RELEASED if held else LeaseEnd.ABORTED)
        return held

    def abort(self, id: RequestId) -> None:
        self._end(id, LeaseEnd.ABORTED)

    def expire(self) -> None:
        """End every lease whose deadline has passed."""
        now = self._clock()
        for id in [id for id, deadline in self._published.items() if deadline.at <= now]:
            self._end(id, LeaseEnd.EXPIRED)

    def next_deadline(self) -> float | None:
        """The time at which `expire` next has a lease to end."""
        return min((deadline.at for deadline in self._published.values()), default=None)

    @property
    def num_live(self) -> int:
        return len(self._open) + len(self._published)

    def _end(self, id: RequestId, end: LeaseEnd) -> None:
        """Nothing happens to a lease that is not live."""
        if self._published.pop(id, None) or id in self._open:
            self._open.discard(id)
            self._on_ended(id, end)
