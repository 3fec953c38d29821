"""Finds the rank that hangs: stopped, stuck in a kernel that never ends, or without its host. Pure.

A rank's process sends pulses, so one without pulses for LEAST_S is lost. A rank whose pulses go on and whose main
thread has not come further for longer than any rank may take now, is lost too. Ranks wait for each other, and one that
waits in a collective looks busy: the one to name has no pulses, or has launched the fewest steps.

While a rank announces what it does (a compilation, a profile), no main thread owes progress, and that rank no pulses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from millrace_common.pace import LEAST_S

from millrace_serve.worker.messages import PULSE_S, Pulse

OVERDUE_S = 2 * PULSE_S  # without a pulse: stopped, if something hangs anyway


@dataclass(frozen=True, slots=True)
class Rank:
    """What was heard of a rank. Times are of one PatientClock."""

    pulse: Pulse
    heard_at: float
    moved_at: float  # its main thread came further, or owed nothing
    began_at: float = 0.0  # what it announces


class RankWatch:
    def __init__(self, num_ranks: int, ceiling_s: float, now: float) -> None:
        """`ceiling_s`: of anything, announced or not."""
        self._ceiling_s = ceiling_s
        unheard = Pulse(0, True, 0, ceiling_s, "")
        self._ranks = [Rank(unheard, now, now)] * num_ranks

    def heard(self, rank: int, pulse: Pulse, now: float) -> None:
        before = self._ranks[rank]
        moved = pulse.waiting or pulse.marks != before.pulse.marks
        same = pulse.doing and pulse.doing == before.pulse.doing
        self._ranks[rank] = Rank(pulse, now, now if moved else before.moved_at, before.began_at if same else now)

    @property
    def busy(self) -> bool:
        """Whether a rank does what it has announced."""
        return any(one.pulse.doing for one in self._ranks)

    def hung(self, now: float) -> str:
        """Which rank hangs, and how that shows; empty: none does. To be called all the time, because of what others
        announce.
        """
        ranks = self._ranks
        for rank, one in enumerate(ranks):
            if one.pulse.doing and now - one.began_at > self._ceiling_s:
                return f"rank {rank} hangs: {one.pulse.doing} has taken {now - one.began_at:.1f} s"
            if not one.pulse.doing and now - one.heard_at > LEAST_S:
                return _silent(rank, now - one.heard_at)
        if self.busy:
            self._ranks = [replace(one, moved_at=now) for one in ranks]
            return ""
        limit_s = min(max(one.pulse.limit_s for one in ranks), self._ceiling_s)
        stuck = [rank for rank, one in enumerate(ranks) if not one.pulse.waiting and now - one.moved_at > limit_s]
        if not stuck:
            return ""
        last = min(range(len(ranks)), key=lambda rank: ranks[rank].heard_at)
        if now - ranks[last].heard_at > OVERDUE_S:
            return _silent(last, now - ranks[last].heard_at)
        behind = min(ranks[rank].pulse.launched for rank in stuck)
        named = [rank for rank in stuck if ranks[rank].pulse.launched == behind]
        names, silence = ", ".join(map(str, named)), now - ranks[named[0]].moved_at
        return f"rank {names} hangs: no step has ended for {silence:.1f} s, and {limit_s:.1f} s are allowed"


def _silent(rank: int, seconds: float) -> str:
    return f"rank {rank} hangs: no sign of its process for {seconds:.1f} s"
