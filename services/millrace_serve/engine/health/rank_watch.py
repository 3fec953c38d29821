"""Finds the rank that hangs: stopped, stuck in a kernel that never ends, or without its host. Pure.

A rank's process sends heartbeats, so one without heartbeats for LEAST_S is lost. A rank whose heartbeats go on and
whose main thread has not come further for longer than any rank may take now, is lost too. Ranks wait for each other,
and one that waits in a collective looks busy: the one to name has no heartbeats, or has launched the fewest steps.

While a rank announces what it does (a compilation, a profile), no main thread owes progress, and that rank no
heartbeats.

No time counts in which a rank was ready and got no CPU, except LEAST_COUNTED of it: its own time for its heartbeats,
that of the most starved rank for the progress of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from millrace_common.pace import LEAST_S

from millrace_serve.engine.health.heartbeat import HEARTBEAT_S, RankHeartbeat

OVERDUE_S = 2 * HEARTBEAT_S  # without a heartbeat: stopped, if something hangs anyway
LEAST_COUNTED = 0.1  # so a limit is ten times as long at most


@dataclass(slots=True)
class WatchedRank:
    """What was heard of a rank."""

    heartbeat: RankHeartbeat
    moved_at: float  # its main thread came further, or owed nothing; in the time of all ranks
    began_at: float  # what it announces; by the watcher's clock
    silent_s: float = 0.0  # in its own time


class RankWatch:
    def __init__(
        self, num_ranks: int, ceiling_s: float, now: float, look: Callable[[int], float | None] = lambda rank: None
    ) -> None:
        """Times are of one PatientClock.

        Args:
            ceiling_s: of anything, announced or not.
            look: how starved a rank was since the call before, from 0 to 1; None: as it said last. It is asked for
                ranks whose heartbeats are overdue.
        """
        self._ceiling_s, self._look = ceiling_s, look
        unheard = RankHeartbeat(0, True, 0, ceiling_s, "")
        self._ranks = [WatchedRank(unheard, now, now) for _ in range(num_ranks)]
        self._now = self._lived = now  # of the latest look; the latter without what a rank was starved

    def heard(self, rank: int, heartbeat: RankHeartbeat, now: float) -> None:
        one = self._ranks[rank]
        if heartbeat.waiting or heartbeat.marks != one.heartbeat.marks:
            one.moved_at = self._lived
        if not heartbeat.doing or heartbeat.doing != one.heartbeat.doing:
            one.began_at = now
        one.heartbeat, one.silent_s = heartbeat, 0.0

    @property
    def busy(self) -> bool:
        """Whether a rank does what it has announced."""
        return any(one.heartbeat.doing for one in self._ranks)

    @property
    def starved(self) -> float:
        """How starved the most starved rank is, from 0 to 1 - LEAST_COUNTED."""
        return min(max(one.heartbeat.starved for one in self._ranks), 1 - LEAST_COUNTED)

    def hung(self, now: float) -> str:
        """Which rank hangs, and how that shows; empty: none does. To be called all the time, because of what others
        announce.
        """
        ranks, passed = self._ranks, now - self._now
        for rank, one in enumerate(ranks):
            if one.silent_s > OVERDUE_S and (starved := self._look(rank)) is not None:
                one.heartbeat = msgspec.structs.replace(one.heartbeat, starved=starved)
            one.silent_s += passed * (1 - min(one.heartbeat.starved, 1 - LEAST_COUNTED))
        self._now, self._lived = now, self._lived + passed * (1 - self.starved)
        for rank, one in enumerate(ranks):
            if one.heartbeat.doing and now - one.began_at > self._ceiling_s:
                return f"rank {rank} hangs: {one.heartbeat.doing} has taken {now - one.began_at:.1f} s"
            if not one.heartbeat.doing and one.silent_s > LEAST_S:
                return _silent(rank, one.silent_s)
        if self.busy:
            for one in ranks:
                one.moved_at = self._lived
            return ""
        limit_s = min(max(one.heartbeat.limit_s for one in ranks), self._ceiling_s)
        late = [self._lived - one.moved_at > limit_s and not one.heartbeat.waiting for one in ranks]
        stuck = [rank for rank, is_late in enumerate(late) if is_late]
        if not stuck:
            return ""
        last = max(range(len(ranks)), key=lambda rank: ranks[rank].silent_s)
        if ranks[last].silent_s > OVERDUE_S:
            return _silent(last, ranks[last].silent_s)
        behind = min(ranks[rank].heartbeat.launched for rank in stuck)
        named = [rank for rank in stuck if ranks[rank].heartbeat.launched == behind]
        names, silence = ", ".join(map(str, named)), self._lived - ranks[named[0]].moved_at
        return f"rank {names} hangs: no step has ended for {silence:.1f} s, and {limit_s:.1f} s are allowed"


def _silent(rank: int, seconds: float) -> str:
    return f"rank {rank} hangs: no sign of its process for {seconds:.1f} s"
