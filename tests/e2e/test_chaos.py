"""A part of `make chaos`: a few faults, one after the other, under load."""

import os
from pathlib import Path

import pytest
from millrace_testing.beside_hostile import beside_hostile
from millrace_testing.chaos import FAULTS, calm, chaos
from millrace_testing.overload_chaos import overload

MINUTES = float(os.environ.get("MILLRACE_STARVE_S", "15")) / 60  # of a test
pytestmark = [pytest.mark.long, pytest.mark.timeout(900 + 60 * MINUTES)]
CHOSEN = (
    *("kill decode", "pause prefill", "tear pages of the disk", "partition decode", "fill the disk", "drain prefill"),
    "kill router",
)
CHOSEN_FLEXIBLE = ("kill flexible", "partition flexible", "drain flexible", "stop rank of flexible")


async def test_nothing_wrong_comes_out_of_a_system_that_breaks(tmp_path: Path) -> None:
    faults = iter([fault for name in CHOSEN for fault in FAULTS if fault.name == name])
    report = await chaos(tmp_path, faults, clients=8, seed=1)
    assert not report.violations, report.violations[:3]
    observed = [one.fault for one in report.observed]
    assert observed == [name for name in CHOSEN if name in observed or name != "fill the disk"], "it needs a mount"
    assert report.tiers["disk_stored_pages"] > 0 and report.tiers["cached_tokens"] > 0, report.tiers
    complete = [seen for seen in report.seen if not seen.error]
    assert len(complete) >= 30, report.table()
    assert sum(one.retries for one in report.observed) > 0, "the faults have hit something"
    only_router = [row for row in report.rows() if row["fault"] != "kill router"]
    assert sum(int(row["errors"]) for row in only_router) <= len(complete) // 10, report.table()


async def test_nothing_wrong_comes_out_of_flexible_workers_that_break_while_their_duties_change(tmp_path: Path) -> None:
    faults = [fault for name in CHOSEN_FLEXIBLE for fault in FAULTS if fault.name == name]
    report = await chaos(tmp_path, faults, clients=8, seed=1, flexible=True)
    assert not report.violations, report.violations[:3]
    assert [one.fault for one in report.observed] == list(CHOSEN_FLEXIBLE)
    assert len(report.duties) == 3 and sum(report.duties.values()) >= 12, report.duties
    complete = [seen for seen in report.seen if not seen.error]
    assert len(complete) >= 30 and len(report.seen) - len(complete) <= len(complete) // 10, report.table()


async def test_overloaded_system_that_breaks_loses_nothing_and_nobody(tmp_path: Path) -> None:
    """Four times, because other tests may take half of the machine while the capacity is measured, and not later."""
    report = await overload(tmp_path, minutes=0.5, seed=2, factors=(1.5, 4.0))
    assert not report.broken(), report.table()
    assert [phase.factor for phase in report.phases] == [1.5, 4.0] and all(phase.kills for phase in report.phases)
    for phase in report.phases:
        row = phase.row()
        assert row["answered"] > 5 and row["computed"] >= row["answered"], row


async def test_honest_tenants_get_their_answers_beside_a_hostile_one(tmp_path: Path) -> None:
    """How fast they are is for `make chaos` to say: this machine may have other work."""
    report = await beside_hostile(tmp_path, minutes=0.4, clients=6, seed=3)
    assert not report.wrong and not report.refused and not report.ended
    assert all(seen.first and seen.gaps for seen in report.seen.values()) and len(report.seen) == 4
    assert len(report.outcomes) == 22 and sum(map(bool, report.outcomes.values())) >= 20, report.table()


async def test_processes_with_a_fifth_of_the_time_are_not_taken_for_hung(tmp_path: Path) -> None:
    """docs/how-to/hangs.md has the result of 10 minutes of each."""
    report = await calm(tmp_path, MINUTES, clients=8, seed=3, throttle="all")
    assert not report.violations, report.violations[:3]
    complete = [seen for seen in report.seen if not seen.error]
    assert len(complete) >= 4 and len(complete) == len(report.seen), report.table()
