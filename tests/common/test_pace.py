import enum
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.pace import FEW, LEAST_S, RECENT, TICK_S, TIMES, PatientClock, Slowest
from millrace_common.transitions import Transitions

GAPS = st.lists(st.floats(0.001, 60.0), min_size=FEW, max_size=3 * RECENT)


@given(GAPS, st.floats(1.0, TIMES - 0.1))
def test_who_goes_on_at_its_pace_is_never_beyond_the_limit(gaps: list[float], slower: float) -> None:
    slowest = Slowest()
    for gap in gaps:
        slowest.add(gap)
    assert all(gap * slower < slowest.limit_s for gap in gaps[-RECENT:])


@given(GAPS)
def test_the_limit_follows_from_recent_gaps_alone(gaps: list[float]) -> None:
    slowest = Slowest()
    for gap in [3600.0, *gaps, *gaps[-1:] * RECENT * 2]:
        slowest.add(gap)
    assert slowest.limit_s == max(LEAST_S, TIMES * gaps[-1])


def test_there_is_no_limit_before_a_few_gaps() -> None:
    slowest = Slowest()
    for _ in range(FEW - 1):
        slowest.add(0.01)
    assert slowest.limit_s == math.inf
    slowest.add(0.01)
    assert slowest.limit_s == LEAST_S


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=50))
def test_a_pause_of_its_owner_counts_for_two_ticks_at_most(pauses: list[float]) -> None:
    real = 5.0
    clock = PatientClock(lambda: real)
    before = clock.now()
    for pause in pauses:
        real += pause
        now = clock.now()
        assert before <= now <= before + 2 * TICK_S + 1e-9 and clock.tick() == now == clock.now()
        before = now
    assert clock.now() <= 5.0 + sum(pauses) + 1e-9


def test_a_clock_that_ticks_in_time_goes_like_any_other() -> None:
    real = 5.0
    clock = PatientClock(lambda: real)
    for _ in range(100):
        real += TICK_S
        clock.tick()
    assert abs(clock.now() - real) < 1e-6


# ------------------------------------------------------------------------------------- the table of a state machine


class Light(enum.Enum):
    RED = enum.auto()
    GREEN = enum.auto()
    BROKEN = enum.auto()


LIGHT = Transitions({Light.RED: {Light.GREEN}, Light.GREEN: {Light.RED, Light.BROKEN}, Light.BROKEN: ()})


def test_an_illegal_move_names_who_made_it() -> None:
    with pytest.raises(AssertionError, match=r"light 7: illegal transition Light.RED -> Light.BROKEN"):
        LIGHT.move(Light.RED, Light.BROKEN, "light 7")
