"""Budget, outliers and what they make of each other: pure, with a clock of our own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.reasons import Reason
from millrace_router.config import OutlierRules, Resilience, RetryBudget
from millrace_router.flow.metrics import build
from millrace_router.resilience.budget import Budget
from millrace_router.resilience.health import FAULTS, Health
from millrace_router.resilience.outliers import LONGEST_PAUSE_S, WINDOW_S, Record, judge
from millrace_router.resilience.window import Window

RULES = OutlierRules(consecutive=3, failures=0.3, slower=5, pause=10, share=0.5)


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
    budget = Budget(RetryBudget(ratio=0.5, per_s=0.2))
    assert [budget.spend(0.0) for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.begin()
    assert [budget.spend(1.0) for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.end(2.0)
    assert not budget.spend(9.0)
    assert budget.spend(12.0), "what was spent at first is forgotten; the requests that ended are not"
    assert [budget.spend(30.0) for _ in range(3)] == [True, True, False]


# ------------------------------------------------------------------------------------- failures in a row


def ejected(now: float = 0.0) -> Record:
    record = Record()
    fail(record, now, RULES.consecutive)
    assert now < record.ejected_until
    return record


def fail(record: Record, now: float, times: int = 1) -> None:
    """As Health does it: judged after every failure."""
    for _ in range(times):
        record.failed(now, alone=True)
        for why in judge({"a": record}, RULES, now).values():
            record.eject(why, RULES, now)


def test_failures_in_a_row_eject_and_a_success_between_them_does_not() -> None:
    record = Record()
    fail(record, 0.0, 2)
    record.spoke(0.1, 10, 0.0)
    fail(record, 0.0, 2)
    assert judge({"a": record}, RULES, 0.0) == {} and not record.ejections
    fail(record, 0.0)
    assert record.why == "consecutive" and record.ejected_until == RULES.pause


def test_failures_that_may_be_anothers_are_none_in_a_row() -> None:
    record = Record()
    for _ in range(9):
        record.failed(0.0, alone=False)
    assert judge({"a": record}, RULES, 0.0) == {}


def test_failures_in_a_row_eject_more_than_the_share() -> None:
    role = {name: Record() for name in "abc"}
    for name in "ab":
        for _ in range(3):
            role[name].failed(0.0, alone=True)
    assert judge(role, RULES, 0.0) == {"a": "consecutive", "b": "consecutive"}


def test_old_failures_do_not_count() -> None:
    record = Record()
    for i in range(20):
        fail(record, 2.0 * i)
        record.spoke(0.1, 10, 2.0 * i)
    fine = Record()
    for _ in range(20):
        fine.spoke(0.1, 10, 38.0 + WINDOW_S)
        record.spoke(0.1, 10, 38.0 + WINDOW_S)
    assert judge({"a": record, "b": fine}, RULES, 38.0 + WINDOW_S) == {} and not record.ejections


def test_a_worker_that_comes_back_is_on_probation_until_its_first_success() -> None:
    record = ejected()
    fail(record, 11.0)
    assert record.ejected_until == 31.0, "one failure is enough, and the pause is longer"
    record.spoke(0.1, 10, 31.5)
    fail(record, 32.0, 2)
    assert judge({"a": record}, RULES, 32.0) == {} and record.ejected_until == 31.0, "it starts anew"


def test_the_pause_grows_up_to_the_longest() -> None:
    record, now, pauses = ejected(), 0.0, []
    for _ in range(35):
        pauses.append(record.ejected_until - now)
        now = record.ejected_until
        fail(record, now)
    assert pauses[:3] == [10.0, 20.0, 30.0] and pauses[28:] == [290.0, 300.0, 300.0, 300.0, 300.0, 300.0, 300.0]


def test_late_outcomes_change_no_ejection() -> None:
    record = ejected()
    for _ in range(10):
        record.spoke(0.1, 10, 0.5)
    fail(record, 0.6, 10)
    assert record.ejected_until == 10.0 and record.ejections == 1


@given(st.lists(st.sampled_from(["spoke", "failed", "wait"]), max_size=200))
def test_random_orders(events: list[str]) -> None:
    """An ejection is never prolonged while it lasts, and never longer than the longest pause."""
    record, now = Record(), 1000.0
    for event in events:
        before = record.ejected_until
        if event == "wait":
            now += 1.0
        elif event == "spoke":
            record.spoke(0.1, 10, now)
        else:
            fail(record, now)
        assert record.ejected_until == before or before <= now
        assert record.ejected_until <= now + LONGEST_PAUSE_S


# ------------------------------------------------------------------------------------- outliers


def record(failures: int = 0, successes: int = 20, seconds: float = 0.1) -> Record:
    made = Record()
    for _ in range(successes):
        made.spoke(seconds, 100, 0.0)
    for _ in range(failures):
        made.failed(0.0, alone=False)
    return made


def test_whoever_fails_more_than_the_others_is_ejected() -> None:
    role = {"a": record(), "b": record(failures=20), "c": record(failures=1)}
    assert judge(role, RULES, 0.0) == {"b": "failing"}


def test_what_all_have_in_common_ejects_nobody() -> None:
    role = {name: record(failures=15, successes=5, seconds=30.0) for name in "abcd"}
    assert judge(role, RULES, 0.0) == {}


def test_never_more_than_the_share() -> None:
    role = {name: record(failures=40 if name in "abc" else 0) for name in "abcdefg"}
    assert len(judge(role, OutlierRules(share=0.3), 0.0)) == 2
    role["a"].eject("failing", RULES, 0.0)
    assert len(judge(role, OutlierRules(share=0.3), 0.0)) == 1
    assert judge(role, OutlierRules(share=0.1), 0.0) == {}
    assert judge({"a": record(failures=40)}, RULES, 0.0) == {}, "alone"


def test_too_few_outcomes_say_nothing() -> None:
    assert judge({"a": record(), "b": record(failures=5, successes=0)}, RULES, 0.0) == {}


@pytest.mark.parametrize(("seconds", "slow"), [(0.4, False), (1.05, False), (1.2, True)])
def test_slow_is_many_times_and_seconds_more(seconds: float, slow: bool) -> None:
    role = {"a": record(seconds=0.1), "b": record(seconds=seconds), "c": record(seconds=0.12)}
    assert judge(role, RULES, 0.0) == ({"b": "slow"} if slow else {})


def test_long_prompts_may_take_longer() -> None:
    long = Record()
    for _ in range(20):
        long.spoke(6.0, 64_000, 0.0)
    assert judge({"a": record(seconds=0.1), "b": long}, RULES, 0.0) == {}


def test_an_ejected_worker_comes_back_and_stays_away_longer_the_next_time() -> None:
    one = record(failures=40)
    one.eject("failing", RULES, 0.0)
    assert one.ejected_until == 10.0
    assert judge({"a": record(), "b": one}, RULES, 11.0) == {}, "it is not judged by the same failures again"
    one.eject("failing", RULES, 12.0)
    assert one.ejected_until == 32.0
    one.eject("failing", RULES, 32.0 + 2 * WINDOW_S)
    assert one.ejections == 1, "two quiet windows forgave two ejections"


# ------------------------------------------------------------------------------------- together


def health() -> tuple[Health, Clock]:
    clock = Clock()
    made = Health(Resilience(outliers=RULES), build(), clock)
    made.keep({"p": "prefill", "d": "decode", "e": "decode"}, [frozenset("p"), frozenset("de")])
    return made, clock


def value(made: Health, name: str, **labels: str) -> float:
    made.report()
    return made._metrics.registry.get_sample_value(name, labels) or 0.0


def test_a_failing_worker_is_left_out_and_taken_back() -> None:
    made, clock = health()
    for _ in range(3):
        made.failed(["d"], Reason.STALLED)
    assert made.left_out() == {"d": "ejected: failures in a row"}
    assert value(made, "millrace_ejected_workers", role="decode") == 1
    clock.now += RULES.pause
    assert made.left_out() == {} and not made._ejected
    made.spoke("d", 0.1, 10)
    assert value(made, "millrace_ejected_workers", role="decode") == 0
    assert value(made, "millrace_ejections_total", role="decode", why="consecutive") == 1


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
    assert value(made, "millrace_ejected_workers", role="decode") == 2
    made.keep({"p": "prefill"}, [frozenset("p"), frozenset()])
    made.report()
    assert made._metrics.registry.get_sample_value("millrace_ejected_workers", {"role": "decode"}) == 0


def test_what_can_be_either_sides_fault_is_none_in_a_row_but_shows_the_outlier() -> None:
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
