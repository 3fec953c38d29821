"""Which rank hangs, by the heartbeats of all."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.pace import LEAST_S, TICK_S
from millrace_serve.engine.health.rank_watch import HEARTBEAT_S, LEAST_COUNTED, RankHeartbeat, RankWatch
from millrace_testing.examples import examples

CEILING_S = 600.0
LATE_S = HEARTBEAT_S + 3 * TICK_S  # by which a hang may be found later than it could


@dataclass
class Fake:
    """A rank that steps, and what a test changes of it."""

    step_s: float = 0.02
    limit_s: float = LEAST_S
    waiting: bool = False
    doing: str = ""
    heartbeats: bool = True
    stuck: bool = False
    launched_less: int = 0  # than the others
    marks: int = 0
    next_heartbeat: float = 0.0
    starved: float = 0.0
    told: float | None = None  # how starved it says that it is, if that is not the truth

    def heartbeat(self, now: float) -> RankHeartbeat:
        if not self.stuck:
            self.marks = int(now / self.step_s)
        told = self.starved if self.told is None else self.told
        return RankHeartbeat(self.marks, self.waiting, 7 - self.launched_less, self.limit_s, self.doing, starved=told)


class Worker:
    def __init__(self, *ranks: Fake, seen: bool = True) -> None:
        """`seen`: the frontend sees how starved a silent rank is."""
        self.ranks, self.now = ranks, 0.0
        accounts = [SimpleNamespace(look=lambda rank=rank: rank.starved) if seen else None for rank in ranks]
        self.watch = RankWatch(len(ranks), CEILING_S, lambda rank: None, lambda: self.now)
        self.watch._begin_account = accounts.__getitem__  # type: ignore[method-assign, assignment]

    def run(self, seconds: float) -> str:
        """Until something is found, or the time is over."""
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            for rank, fake in enumerate(self.ranks):
                if fake.heartbeats and self.now >= fake.next_heartbeat:
                    self.watch.heard(rank, fake.heartbeat(self.now))
                    fake.next_heartbeat = self.now + HEARTBEAT_S
            if why := self.watch.hung():
                return why
        return ""


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=4), st.floats(1.0, 300.0))
@examples(10)
def test_ranks_that_go_on_at_their_pace_are_never_lost(steps: list[float], seconds: float) -> None:
    """However slow they are; a rank's step is within the limit that the slowest of them tells."""
    assert Worker(*(Fake(step_s, limit_s=max(LEAST_S, 20 * step_s)) for step_s in steps)).run(seconds) == ""


@given(st.integers(0, 3), st.floats(0.001, 5.0), st.booleans())
@examples(15)
def test_rank_that_stops_is_always_lost_within_the_bound(victim: int, step_s: float, stopped: bool) -> None:
    limit_s = max(LEAST_S, 20 * step_s)
    ranks = [Fake(step_s, limit_s) for _ in range(4)]
    worker = Worker(*ranks)
    assert worker.run(5) == ""
    if stopped:
        ranks[victim].heartbeats = False
    else:
        for rank in ranks:
            rank.stuck = True
        ranks[victim].launched_less = 1
    at = worker.now
    assert worker.run(1000).startswith(f"rank {victim} hangs")
    assert worker.now - at <= (LEAST_S if stopped else limit_s) + LATE_S


def test_idle_rank_owes_nothing_but_heartbeats() -> None:
    idle = Fake(waiting=True, stuck=True)
    worker = Worker(idle)
    assert worker.run(3600) == ""
    idle.heartbeats = False
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
    follower.heartbeats, leader.stuck = False, True
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
    compiling.heartbeats = False  # a compiler may keep the interpreter's lock
    assert worker.run(CEILING_S - 10) == "" and worker.watch.busy
    compiling.doing, compiling.heartbeats = "", True
    assert worker.run(LEAST_S - HEARTBEAT_S) == "" and not worker.watch.busy  # all get the time of a step again
    compiling.stuck = False
    assert worker.run(10).startswith("rank 1 hangs")


def test_announcements_one_after_the_other_have_a_ceiling_each() -> None:
    rank = Fake(doing="one", stuck=True)
    worker = Worker(rank)
    assert worker.run(CEILING_S - 10) == ""
    rank.doing = "a profile"
    assert worker.run(CEILING_S - 1) == ""
    assert worker.run(5).startswith("rank 0 hangs: a profile has taken 600.")


def test_step_without_a_known_limit_has_the_ceiling() -> None:
    rank = Fake(limit_s=math.inf)
    worker = Worker(rank)
    assert worker.run(5) == ""
    rank.stuck = True
    assert worker.run(CEILING_S - 10) == ""
    assert worker.run(20).startswith("rank 0 hangs: no step has ended for 600.")


PARTS = st.floats(0.0, 1 - LEAST_COUNTED)


@given(PARTS, PARTS, st.floats(1.0, 60.0))
@examples(20)
def test_steps_that_are_slow_because_a_rank_gets_no_cpu_are_no_hang(one: float, other: float, seconds: float) -> None:
    """A step takes 1.5 s of unstarved time, and a rank waits for the most starved one."""
    step_s = 1.5 / (1 - max(one, other))
    ranks = Fake(step_s, starved=one), Fake(step_s, starved=other)
    assert Worker(*ranks).run(seconds) == ""


@given(PARTS, st.booleans())
@examples(20)
def test_hang_of_starved_ranks_is_found_in_unstarved_time(starved: float, stopped: bool) -> None:
    ranks = Fake(starved=starved), Fake(starved=starved)
    worker = Worker(*ranks)
    assert worker.run(5) == ""
    for rank in ranks:
        rank.stuck = True
    ranks[1].launched_less, ranks[1].heartbeats = 1, not stopped
    at = worker.now
    assert worker.run(1000).startswith("rank 1 hangs")
    assert worker.now - at <= (LEAST_S + LATE_S) / (1 - starved) + LATE_S


def test_rank_whose_heartbeats_get_no_cpu_is_no_hang() -> None:
    rank = Fake(waiting=True)
    worker = Worker(rank)
    assert worker.run(5) == ""
    rank.starved, rank.heartbeats = 1.0, False
    assert worker.run(9) == "", "it is seen to wait for a CPU"
    rank.starved = 0.0
    assert worker.run(5).startswith("rank 0 hangs: no sign of its process")


@pytest.mark.parametrize("seen", [True, False])
def test_stopped_rank_is_not_starved_any_more(seen: bool) -> None:
    """If it is seen from here. Else the best guess is what it said last."""
    rank = Fake(waiting=True, told=0.5)
    worker = Worker(rank, seen=seen)
    assert worker.run(5) == ""
    rank.heartbeats, at = False, worker.now
    assert worker.run(60).startswith("rank 0 hangs: no sign of its process")
    assert worker.now - at <= (LEAST_S + 0.8 if seen else 2 * LEAST_S) + LATE_S


def test_nobody_is_starved_for_ever() -> None:
    """A limit is ten times as long at most."""
    rank = Fake(starved=1.0)
    worker = Worker(rank)
    assert worker.run(5) == "" and worker.watch.starved == 1 - LEAST_COUNTED
    rank.stuck, at = True, worker.now
    assert worker.run(1000).startswith("rank 0 hangs")
    assert worker.now - at <= (LEAST_S + LATE_S) / LEAST_COUNTED
