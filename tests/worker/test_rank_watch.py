"""Which rank hangs, by the pulses of all."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from millrace_common.pace import LEAST_S, TICK_S
from millrace_serve.worker.frontend.rank_watch import RankWatch
from millrace_serve.worker.messages import PULSE_S, Pulse

CEILING_S = 600.0
LATE_S = PULSE_S + 3 * TICK_S  # by which a hang may be found later than it could


@dataclass
class Fake:
    """A rank that steps, and what a test changes of it."""

    step_s: float = 0.02
    limit_s: float = LEAST_S
    waiting: bool = False
    doing: str = ""
    pulses: bool = True
    stuck: bool = False
    launched_less: int = 0  # than the others
    marks: int = 0
    next_pulse: float = 0.0

    def pulse(self, now: float) -> Pulse:
        if not self.stuck:
            self.marks = int(now / self.step_s)
        return Pulse(self.marks, self.waiting, 7 - self.launched_less, self.limit_s, self.doing)


class Worker:
    def __init__(self, *ranks: Fake) -> None:
        self.ranks, self.now = ranks, 0.0
        self.watch = RankWatch(len(ranks), CEILING_S, 0.0)

    def run(self, seconds: float) -> str:
        """Until something is found, or the time is over."""
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            for rank, fake in enumerate(self.ranks):
                if fake.pulses and self.now >= fake.next_pulse:
                    self.watch.heard(rank, fake.pulse(self.now), self.now)
                    fake.next_pulse = self.now + PULSE_S
            if why := self.watch.hung(self.now):
                return why
        return ""


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=4), st.floats(1.0, 300.0))
@settings(deadline=None, max_examples=30)
def test_ranks_that_go_on_at_their_pace_are_never_lost(steps: list[float], seconds: float) -> None:
    """However slow they are; a rank's step is within the limit that the slowest of them tells."""
    assert Worker(*(Fake(step_s, limit_s=max(LEAST_S, 20 * step_s)) for step_s in steps)).run(seconds) == ""


@given(st.integers(0, 3), st.floats(0.001, 5.0), st.booleans())
@settings(deadline=None, max_examples=40)
def test_a_rank_that_stops_is_always_lost_within_the_bound(victim: int, step_s: float, stopped: bool) -> None:
    limit_s = max(LEAST_S, 20 * step_s)
    ranks = [Fake(step_s, limit_s) for _ in range(4)]
    worker = Worker(*ranks)
    assert worker.run(5) == ""
    if stopped:
        ranks[victim].pulses = False
    else:
        for rank in ranks:
            rank.stuck = True
        ranks[victim].launched_less = 1
    at = worker.now
    assert worker.run(1000).startswith(f"rank {victim} hangs")
    assert worker.now - at <= (LEAST_S if stopped else limit_s) + LATE_S


def test_an_idle_rank_owes_nothing_but_pulses() -> None:
    idle = Fake(waiting=True, stuck=True)
    worker = Worker(idle)
    assert worker.run(3600) == ""
    idle.pulses = False
    assert worker.run(10) == "rank 0 hangs: no sign of its process for 2.1 s"


def test_who_waits_for_others_in_lockstep_is_not_to_blame() -> None:
    victim = Fake()
    worker = Worker(Fake(waiting=True, stuck=True, launched_less=3), victim)
    assert worker.run(60) == ""
    victim.stuck = True
    assert worker.run(60).startswith("rank 1 hangs: no step has ended for 2.")


def test_of_ranks_in_a_collective_the_stopped_one_is_named() -> None:
    """The leader looks busy: it waits on its device."""
    leader, follower = Fake(), Fake()
    worker = Worker(leader, follower)
    assert worker.run(60) == ""
    follower.pulses, leader.stuck = False, True
    assert worker.run(60).startswith("rank 1 hangs: no sign of its process")


def test_ranks_that_are_equally_far_are_all_named() -> None:
    ranks = Fake(), Fake()
    worker = Worker(*ranks)
    assert worker.run(60) == ""
    for rank in ranks:
        rank.stuck = True
    assert worker.run(60).startswith("rank 0, 1 hangs")


def test_while_one_rank_announces_none_owes_progress() -> None:
    compiling, other = Fake(), Fake()
    worker = Worker(compiling, other)
    assert worker.run(60) == ""
    compiling.doing, compiling.stuck, other.stuck = "the compilation of a kernel", True, True
    assert worker.run(0.5) == ""
    compiling.pulses = False  # a compiler may keep the interpreter's lock
    assert worker.run(CEILING_S - 10) == "" and worker.watch.busy
    compiling.doing, compiling.pulses = "", True
    assert worker.run(LEAST_S - PULSE_S) == "" and not worker.watch.busy  # all get the time of a step again
    compiling.stuck = False
    assert worker.run(10).startswith("rank 1 hangs")


def test_an_announcement_has_a_ceiling() -> None:
    rank = Fake(doing="a profile", stuck=True)
    worker = Worker(rank)
    assert worker.run(CEILING_S - 1) == ""
    assert worker.run(5) == "rank 0 hangs: a profile has taken 600.0 s"


def test_announcements_one_after_the_other_have_a_ceiling_each() -> None:
    rank = Fake(doing="one", stuck=True)
    worker = Worker(rank)
    assert worker.run(CEILING_S - 10) == ""
    rank.doing = "another"
    assert worker.run(CEILING_S - 10) == ""


def test_a_step_without_a_known_limit_has_the_ceiling() -> None:
    rank = Fake(limit_s=math.inf)
    worker = Worker(rank)
    assert worker.run(5) == ""
    rank.stuck = True
    assert worker.run(CEILING_S - 10) == ""
    assert worker.run(20).startswith("rank 0 hangs: no step has ended for 600.")
