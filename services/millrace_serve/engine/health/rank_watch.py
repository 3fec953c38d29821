"""Finds the rank that hangs: stopped, stuck in a kernel that never ends, or without its host.

A rank's process sends heartbeats, so one without heartbeats for LEAST_S is lost. A rank whose heartbeats go on and
whose main thread has not come further for longer than any rank may take now, is lost too. Ranks wait for each other,
and one that waits in a collective looks busy: the one to name has no heartbeats, or has launched the fewest steps.

While a rank announces what it does (a compilation, a profile), no main thread owes progress, and that rank no beats.

No time counts in which a rank lacked a CPU, a disk or memory, except LEAST_COUNTED of it: its own time for its
heartbeats, that of the most starved rank for the progress of all.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import msgspec
from millrace_common.log import survived
from millrace_common.pace import LEAST_S, TICK_S, PatientClock, Starvation

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.4  # between two heartbeats of a rank
OVERDUE_S = 2 * HEARTBEAT_S  # without a heartbeat: stopped, if something hangs anyway
LEAST_COUNTED = 0.1  # so a limit is ten times as long at most


class RankHeartbeat(msgspec.Struct, frozen=True, tag=True):
    """The rank's process runs. The first five fields are those of progress.py."""

    marks: int
    waiting: bool
    launched: int
    limit_s: float
    doing: str
    compiled: dict[str, int] = {}
    starved: float = 0.0  # part of the last HEARTBEAT_S that a thread lost (pace.py), or by which this came late


@dataclass(slots=True)
class WatchedRank:
    """What was heard of a rank."""

    heartbeat: RankHeartbeat
    moved_at: float  # its main thread came further, or owed nothing; in the time of all ranks
    began_at: float  # what it announces; by the watcher's clock
    silent_s: float = 0.0  # in its own time
    account: Starvation | None = None  # since its heartbeat is overdue; None: it is as starved as it said last


class RankWatch:
    def __init__(
        self, num_ranks: int, ceiling_s: float, pid: Callable[[int], int | None], clock: Callable[[], float] = monotonic
    ) -> None:
        """`ceiling_s`: of anything, announced or not; `pid`: of a rank, None if it is not seen from here."""
        self._ceiling_s, self._pid, self._clock = ceiling_s, pid, PatientClock(clock)
        now = self._clock.now()
        unheard = RankHeartbeat(0, True, 0, ceiling_s, "")
        self._ranks = [WatchedRank(unheard, now, now) for _ in range(num_ranks)]
        self._now = self._lived = now  # of the latest look; the latter without what a rank was starved

    def heard(self, rank: int, heartbeat: RankHeartbeat) -> None:
        one = self._ranks[rank]
        if heartbeat.waiting or heartbeat.marks != one.heartbeat.marks:
            one.moved_at = self._lived
        if not heartbeat.doing or heartbeat.doing != one.heartbeat.doing:
            one.began_at = self._clock.now()
        one.heartbeat, one.silent_s, one.account = heartbeat, 0.0, None

    @property
    def busy(self) -> bool:
        """A rank does what it has announced."""
        return any(one.heartbeat.doing for one in self._ranks)

    @property
    def starved(self) -> float:
        """How starved the most starved rank is, from 0 to 1 - LEAST_COUNTED."""
        return min(max(one.heartbeat.starved for one in self._ranks), 1 - LEAST_COUNTED)

    async def until_hung(self) -> str:
        """Look all the time, because of what ranks announce. Returns which one hangs, and how that shows."""
        why = ""
        with survived(log, "the ranks cannot be watched"):
            while not (why := self.hung()):
                await asyncio.sleep(TICK_S)
        return why or "the ranks cannot be watched, and one that hangs would not be found"

    def hung(self) -> str:
        """Empty: none does."""
        now = self._clock.tick()
        ranks, passed = self._ranks, now - self._now
        for rank, one in enumerate(ranks):
            if one.silent_s > OVERDUE_S and one.account is not None:
                one.heartbeat = msgspec.structs.replace(one.heartbeat, starved=one.account.look())
            elif one.silent_s > OVERDUE_S:
                one.account = self._begin_account(rank)
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
        owing = [rank for rank, one in enumerate(ranks) if not one.heartbeat.waiting]
        if not (stuck := [rank for rank in owing if self._lived - ranks[rank].moved_at > limit_s]):
            return ""
        last = max(range(len(ranks)), key=lambda rank: ranks[rank].silent_s)
        if ranks[last].silent_s > OVERDUE_S:
            return _silent(last, ranks[last].silent_s)
        behind = min(ranks[rank].heartbeat.launched for rank in stuck)
        named = [rank for rank in stuck if ranks[rank].heartbeat.launched == behind]
        names, silence = ", ".join(map(str, named)), self._lived - ranks[named[0]].moved_at
        return f"rank {names} hangs: no step has ended for {silence:.1f} s, and {limit_s:.1f} s are allowed"

    def _begin_account(self, rank: int) -> Starvation | None:
        return None if (pid := self._pid(rank)) is None else Starvation(pid)


def _silent(rank: int, seconds: float) -> str:
    return f"rank {rank} hangs: no sign of its process for {seconds:.1f} s"
