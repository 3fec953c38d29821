"""Budget, breaker, outliers and what they make of each other: pure, with a clock of our own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.reasons import Reason
from millrace_router.flow.metrics import build
from millrace_router.resilience.breaker import LEGAL, Breaker, State
from millrace_router.resilience.budget import Budget
from millrace_router.resilience.config import BreakerRules, OutlierRules, Resilience, RetryBudget
from millrace_router.resilience.health import FAULTS, Health
from millrace_router.resilience.outliers import Record, judge
from millrace_router.resilience.window import Window

RULES = BreakerRules(consecutive=3, ratio=0.5, least=8, window=10, pause=2, longest_pause=5, probes=2, probe=4)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# ------------------------------------------------------------------------------------- window


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 5)), max_size=40))
def test_a_window_forgets_what_is_older_than_itself(steps: list[tuple[float, int]]) -> None:
    """Nothing younger than nine tenths of it is forgotten, nothing older than all of it is counted."""
    window, now, added = Window(10.0, 1), 0.0, []
    for step, amount in steps:
        now += step
        window.add(0, amount, now)
        added.append((now, amount))
        (total,) = window.sums(now)
        assert sum(n for at, n in added if now - at < 9.0) <= total <= sum(n for at, n in added if now - at <= 10.0)


# ------------------------------------------------------------------------------------- budget


def test_the_budget_follows_the_requests_that_are_alive() -> None:
    budget = Budget(RetryBudget(window=10, ratio=0.5, per_s=0.2))
    assert [budget.spend(0.0) for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.begin()
    assert [budget.spend(1.0) for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.end(2.0)
    assert not budget.spend(9.0)
    assert budget.spend(12.0), "what was spent at first is forgotten; the requests that ended are not"
    assert [budget.spend(30.0) for _ in range(3)] == [True, True, False]


# ------------------------------------------------------------------------------------- breaker


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(RULES)
    for _ in range(RULES.consecutive):
        breaker.failed(now)
    assert breaker.state is State.OPEN
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(RULES)
    for event in ("failed", "failed", "succeeded", "failed", "failed"):
        getattr(breaker, event)(0.0)
    assert breaker.state is State.CLOSED and not breaker.why_not(0.0)
    breaker.failed(0.0)
    assert breaker.why_not(0.0) == "circuit open"


def test_a_share_of_failures_opens_it_once_there_are_enough() -> None:
    breaker = Breaker(RULES)
    for i in range(7):
        (breaker.failed if i % 2 else breaker.succeeded)(0.1 * i)
    assert breaker.state is State.CLOSED
    breaker.failed(0.8)
    assert breaker.state is State.OPEN


def test_old_failures_do_not_count() -> None:
    breaker = Breaker(RULES)
    for i in range(20):
        breaker.failed(6.0 * i)
        breaker.succeeded(6.0 * i)
    assert breaker.state is State.CLOSED


def test_probes_go_one_by_one_and_close_it() -> None:
    breaker = opened()
    assert breaker.why_not(1.9)
    assert not breaker.why_not(2.0) and breaker.state is State.HALF_OPEN
    breaker.sent(2.0)
    assert "probe" in breaker.why_not(2.1)
    breaker.succeeded(2.2)
    assert not breaker.why_not(2.2) and breaker.state is State.HALF_OPEN
    breaker.sent(2.2)
    breaker.succeeded(2.3)
    assert breaker.state is State.CLOSED
    breaker.failed(2.4)
    breaker.failed(2.4)
    assert breaker.state is State.CLOSED, "it starts anew"


def test_a_probe_whose_end_nobody_hears_of_does_not_block_the_next() -> None:
    breaker = opened()
    assert not breaker.why_not(2.0)
    breaker.sent(2.0)
    assert breaker.why_not(5.9) and not breaker.why_not(6.0)


def test_the_pause_doubles_up_to_the_longest() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(4):
        began = now
        while breaker.why_not(now):
            now += 0.125
        pauses.append(now - began)
        breaker.failed(now)
    assert pauses == [2.0, 4.0, 5.0, 5.0]


def test_late_answers_do_not_close_an_open_breaker() -> None:
    breaker = opened()
    for _ in range(10):
        breaker.succeeded(0.5)
    assert breaker.why_not(0.5)


@given(st.lists(st.sampled_from(["succeeded", "failed", "sent", "why_not", "wait"]), max_size=200))
def test_random_orders(events: list[str]) -> None:
    """Only legal moves; it always admits somebody again once the longest pause has passed."""
    breaker, now = Breaker(RULES), 0.0
    for event in events:
        before = breaker.state
        if event == "wait":
            now += 1.0
        else:
            getattr(breaker, event)(now)
        assert breaker.state is before or breaker.state in LEGAL[before]
    assert not breaker.why_not(now + RULES.longest_pause)


# ------------------------------------------------------------------------------------- outliers

OUTLIERS = OutlierRules(window=30, least=10, failures=0.3, slower=5, slower_by=1.0, pause=10, share=0.5)


def record(failures: int = 0, successes: int = 20, seconds: float = 0.1) -> Record:
    made = Record(Window(OUTLIERS.window, 2))
    for _ in range(successes):
        made.spoke(seconds, 100, 0.0)
    for _ in range(failures):
        made.failed(0.0)
    return made


def test_whoever_fails_more_than_the_others_is_ejected() -> None:
    role = {"a": record(), "b": record(failures=20), "c": record(failures=1)}
    assert judge(role, OUTLIERS, 0.0) == {"b": "failing"}


def test_what_all_have_in_common_ejects_nobody() -> None:
    role = {name: record(failures=15, successes=5, seconds=30.0) for name in "abcd"}
    assert judge(role, OUTLIERS, 0.0) == {}


def test_never_more_than_the_share() -> None:
    role = {name: record(failures=40 if name in "abc" else 0) for name in "abcdefg"}
    assert len(judge(role, OutlierRules(share=0.3), 0.0)) == 2
    role["a"].eject(OUTLIERS, 0.0)
    assert len(judge(role, OutlierRules(share=0.3), 0.0)) == 1
    assert judge(role, OutlierRules(share=0.1), 0.0) == {}
    assert judge({"a": record(failures=40)}, OUTLIERS, 0.0) == {}, "alone"


def test_too_few_outcomes_say_nothing() -> None:
    assert judge({"a": record(), "b": record(failures=5, successes=0)}, OUTLIERS, 0.0) == {}


@pytest.mark.parametrize(("seconds", "slow"), [(0.4, False), (1.05, False), (1.2, True)])
def test_slow_is_many_times_and_seconds_more(seconds: float, slow: bool) -> None:
    role = {"a": record(seconds=0.1), "b": record(seconds=seconds), "c": record(seconds=0.12)}
    assert judge(role, OUTLIERS, 0.0) == ({"b": "slow"} if slow else {})


def test_long_prompts_may_take_longer() -> None:
    long = Record(Window(OUTLIERS.window, 2))
    for _ in range(20):
        long.spoke(6.0, 64_000, 0.0)
    assert judge({"a": record(seconds=0.1), "b": long}, OUTLIERS, 0.0) == {}


def test_an_ejected_worker_comes_back_and_stays_away_longer_the_next_time() -> None:
    one = record(failures=40)
    one.eject(OUTLIERS, 0.0)
    assert one.ejected_until == 10.0
    assert judge({"a": record(), "b": one}, OUTLIERS, 11.0) == {}, "it is not judged by the same failures again"
    one.eject(OUTLIERS, 12.0)
    assert one.ejected_until == 32.0
    one.eject(OUTLIERS, 32.0 + 2 * OUTLIERS.window)
    assert one.ejections == 1, "two quiet windows forgave two ejections"


# ------------------------------------------------------------------------------------- together


def health(**rules: object) -> tuple[Health, Clock]:
    clock = Clock()
    made = Health(Resilience(breaker=RULES, **rules), build(), clock)
    made.keep({"p": "prefill", "d": "decode", "e": "decode"}, [frozenset("p"), frozenset("de")])
    return made, clock


def value(made: Health, name: str, **labels: str) -> float:
    made.report()
    return made._metrics.registry.get_sample_value(name, labels) or 0.0


def test_a_failing_worker_is_left_out_probed_and_taken_back() -> None:
    made, clock = health()
    for _ in range(3):
        made.failed(["d"], Reason.STALLED)
    assert made.left_out() == {"d": "circuit open"}
    assert value(made, "millrace_breakers", role="decode", state="open") == 1
    clock.now += 2
    assert made.left_out() == {}
    made.sent("d")
    assert "probe" in made.left_out()["d"]
    for _ in range(2):
        made.spoke("d", 0.1, 10)
    assert made.left_out() == {} and not made._suspects
    assert value(made, "millrace_breakers", role="decode", state="closed") == 2
    assert value(made, "millrace_breaker_transitions_total", role="decode", state="closed") == 1


@pytest.mark.parametrize("reason", sorted(set(Reason) - FAULTS))
def test_what_is_not_the_workers_fault_is_not_counted(reason: Reason) -> None:
    made, _ = health()
    for _ in range(100):
        made.failed(["d"], reason)
    assert made.left_out() == {}


def test_a_role_without_workers_has_none_in_any_state() -> None:
    made, _ = health()
    for _ in range(20):
        made.failed(["p", "d"], Reason.TRANSFER_FAILED)
        for epoch in "pe":
            made.spoke(epoch, 0.1, 10)
    for _ in range(3):
        made.failed(["e"], Reason.STALLED)
    opened, ejected = {"role": "decode", "state": "open"}, {"role": "decode"}
    assert value(made, "millrace_breakers", **opened) == value(made, "millrace_ejected_workers", **ejected) == 1
    made.keep({"p": "prefill"}, [frozenset("p"), frozenset()])
    assert value(made, "millrace_breakers", **opened) == value(made, "millrace_ejected_workers", **ejected) == 0
    assert value(made, "millrace_breakers", role="prefill", state="closed") == 1


def test_what_can_be_either_sides_fault_opens_no_breaker_but_shows_the_outlier() -> None:
    """The decode worker's network is broken: the prefill worker has failures with it, and none with the other."""
    made, _ = health()
    for _ in range(20):
        made.failed(["p", "d"], Reason.TRANSFER_FAILED)
        for epoch in "pe":
            made.spoke(epoch, 0.1, 10)
    assert list(made.left_out()) == ["d"] and "ejected" in made.left_out()["d"]
    assert value(made, "millrace_ejected_workers", role="decode") == 1
    assert value(made, "millrace_ejections_total", role="decode", why="failing") == 1


def test_a_role_is_never_left_out_as_a_whole() -> None:
    made, _ = health()
    for epoch in "pde":
        for _ in range(3):
            made.failed([epoch], Reason.WORKER_LOST)
    assert made.left_out() == {}
    made.keep({"p": "prefill", "d": "decode", "e": "decode", "f": "decode"}, [frozenset("p"), frozenset("def")])
    assert set(made.left_out()) == {"d", "e"}


def test_another_process_begins_anew() -> None:
    made, _ = health()
    for _ in range(3):
        made.failed(["d"], Reason.STALLED)
    made.keep({"p": "prefill", "d2": "decode", "e": "decode"}, [frozenset("p"), frozenset(["d2", "e"])])
    assert made.left_out() == {}
    made.failed(["d"], Reason.STALLED)  # a late word of the old one
