"""Detection of a rank that hangs: a collective waits for a lost partner, or a kernel never ends. Its process lives, so
nothing else notices.

A rank with running sequences reports the end of a step every few milliseconds. A rank that is silent for `limit_s`
after such a report is lost.
"""

from __future__ import annotations


class StepWatch:
    """Times are of one monotonic clock, in seconds."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._busy: dict[int, float] = {}  # rank: time of its last report, if sequences ran then

    def heard(self, rank: int, running: int, now: float) -> None:
        if running:
            self._busy[rank] = now
        else:
            self._busy.pop(rank, None)

    def hung(self, now: float) -> int | None:
        """The rank that has been silent for the longest time, if that is too long."""
        rank = min(self._busy, key=lambda rank: self._busy[rank], default=None)
        return rank if rank is not None and now - self._busy[rank] > self.limit_s else None
