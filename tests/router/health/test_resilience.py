"""Budget, outliers and what they make of each other: pure, with a clock of our own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.reasons import Reason
from millrace_router.config import OutlierRules, Resilience, RetryBudget
from millrace_router.flow.metrics import build
from millrace_router.health.retry_budget import Budget
from millrace_router.health.workers import FAULTS, LONGEST_PAUSE_S, WINDOW_S, Record, WorkerHealth
from millrace_router.window import Window
from router.harness import Clock

RULES = OutlierRules(consecutive=3, pause=10)


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
    left = budget.left(2.0)
    for _ in range(4):
        budget.end(2.0)
    assert budget.left(2.0) == left and not budget.spend(9.0)
    assert budget.spend(12.0), "what was spent at first is forgotten; the requests that ended are not"
    assert [budget.spend(30.0) for _ in range(3)] == [True, True, False]


# ------------------------------------------------------------------------------------- failures in a row


def ejected(now: float = 0.0) -> Record:
    record = Record()
    assert fail(record, now, RULES.consecutive) and now < record.ejected_until
    return record


def fail(record: Record, now: float, times: int = 1) -> bool:
    """Whether one of the failures ejected the worker."""
    return sum(record.failed(RULES, now) for _ in range(times)) > 0


def test_a_worker_that_comes_back_is_on_probation_until_its_first_success() -> None:
    record = ejected()
    assert fail(record, 11.0) and record.ejected_until == 31.0, "one failure is enough, and the pause is longer"
    record.in_a_row = 0
    assert not fail(record, 32.0, 2) and record.ejected_until == 31.0, "it starts anew"


def test_the_pause_grows_up_to_the_longest() -> None:
    record, now, pauses = ejected(), 0.0, []
    for _ in range(35):
        pauses.append(record.ejected_until - now)
        now = record.ejected_until
        fail(record, now)
    assert pauses[:3] == [10.0, 20.0, 30.0] and pauses[28:] == [290.0, 300.0, 300.0, 300.0, 300.0, 300.0, 300.0]


def test_quiet_windows_forgive_ejections() -> None:
    record = ejected()
    assert fail(record, 10.0) and record.ejections == 2
    assert fail(record, record.ejected_until + 2 * WINDOW_S) and record.ejections == 1


@given(st.lists(st.sampled_from(["spoke", "failed", "wait"]), max_size=200))
def test_an_ejection_in_random_orders_is_never_prolonged(events: list[str]) -> None:
    """An ejection is never prolonged while it lasts, and never longer than the longest pause."""
    record, now = Record(), 1000.0
    for event in events:
        before = record.ejected_until
        if event == "wait":
            now += 1.0
        elif event == "spoke":
            record.in_a_row = 0
        else:
            fail(record, now)
        assert record.ejected_until == before or before <= now
        assert record.ejected_until <= now + LONGEST_PAUSE_S


# ------------------------------------------------------------------------------------- together


def health() -> tuple[WorkerHealth, Clock]:
    clock = Clock(1000.0)
    made = WorkerHealth(Resilience(outliers=RULES), build(), clock)
    made.keep({"p": "prefill", "d": "decode", "e": "decode"}, [frozenset("p"), frozenset("de")])
    return made, clock


def value(made: WorkerHealth, name: str, **labels: str) -> float:
    made.report()
    return made._metrics.registry.get_sample_value(name, labels) or 0.0


def test_a_failing_worker_is_left_out_and_taken_back() -> None:
    made, clock = health()
    for _ in range(3):
        made.failed(["d"], Reason.STALLED)
    assert made.ejected() == {"d"}
    assert value(made, "millrace_ejected_workers", role="decode") == 1
    clock.now += RULES.pause
    assert made.ejected() == set() and not made._ejected
    made.spoke("d")
    assert value(made, "millrace_ejected_workers", role="decode") == 0
    assert value(made, "millrace_ejections_total", role="decode", why="consecutive") == 1


@pytest.mark.parametrize("reason", sorted(set(Reason) - FAULTS))
def test_what_is_not_the_workers_fault_is_not_counted(reason: Reason) -> None:
    made, _ = health()
    for _ in range(100):
        made.failed(["d"], reason)
    assert made.ejected() == set()


def test_a_role_without_workers_has_none_in_any_state() -> None:
    made, _ = health()
    for epoch in "de":
        for _ in range(3):
            made.failed([epoch], Reason.STALLED)
    assert value(made, "millrace_ejected_workers", role="decode") == 2
    made.keep({"p": "prefill"}, [frozenset("p"), frozenset()])
    made.report()
    assert made._metrics.registry.get_sample_value("millrace_ejected_workers", {"role": "decode"}) == 0


def test_what_can_be_either_sides_fault_ejects_nobody() -> None:
    made, _ = health()
    for _ in range(20):
        made.failed(["p", "d"], Reason.TRANSFER_FAILED)
    assert made.ejected() == set() and value(made, "millrace_ejected_workers", role="decode") == 0
    for _ in range(20):
        made.failed(["gone", "d"], Reason.TRANSFER_FAILED)  # the other process was killed, which is why it failed
    assert made.ejected() == set() and made._records["d"].in_a_row == 0


def test_a_role_is_never_left_out_as_a_whole() -> None:
    made, _ = health()
    for epoch in "pde":
        for _ in range(3):
            made.failed([epoch], Reason.WORKER_LOST)
    assert made.ejected() == set()
    made.keep({"p": "prefill", "d": "decode", "e": "decode", "f": "decode"}, [frozenset("p"), frozenset("def")])
    assert made.ejected() == {"d", "e"}


def test_another_process_begins_anew() -> None:
    made, _ = health()
    for _ in range(3):
        made.failed(["d"], Reason.STALLED)
    made.keep({"p": "prefill", "d2": "decode", "e": "decode"}, [frozenset("p"), frozenset(["d2", "e"])])
    assert made.ejected() == set()
    made.failed(["d"], Reason.STALLED)  # a late word of the old one
    assert made._records.keys() == {"p", "d2", "e"} and not made._ejected
