"""A part of `make chaos`: a few faults, one after the other, under load."""

from __future__ import annotations

from pathlib import Path

import pytest
from millrace_testing.chaos import FAULTS, chaos

pytestmark = pytest.mark.timeout(400)

CHOSEN = ("kill decode", "pause prefill", "partition decode", "drain prefill", "kill router")


async def test_nothing_wrong_comes_out_of_a_system_that_breaks(tmp_path: Path) -> None:
    faults = iter([fault for name in CHOSEN for fault in FAULTS if fault.name == name])
    report = await chaos(tmp_path, faults, clients=8, seed=1)
    assert not report.violations, report.violations[:3]
    assert [one.fault for one in report.observed] == list(CHOSEN)
    complete = [seen for seen in report.seen if not seen.error]
    assert len(complete) >= 30, report.table()
    assert sum(one.retries for one in report.observed) > 0, "the faults have hit something"
    only_router = [row for row in report.rows() if row["fault"] != "kill router"]
    assert sum(int(row["errors"]) for row in only_router) <= len(complete) // 10, report.table()
