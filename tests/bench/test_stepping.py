"""The bench of stepping together: its rows, measured on few ranks in a process of its own, because it forks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_rows_of_few_ranks(tmp_path: Path) -> None:
    few = ["--agreements", "2/1", "8/2", "--groups", "2", "--steps", "30", "--out", str(tmp_path / "rows.json")]
    subprocess.run([sys.executable, "-m", "millrace_bench.stepping", *few], check=True, timeout=120)
    rows = json.loads((tmp_path / "rows.json").read_text())["results"]["rows"]
    assert [(row["kind"], row.get("over")) for row in rows] == [
        *[("agreement", "shared memory"), ("agreement", "gloo"), ("wake", None)] * 2,
        *[("batch", "shared memory"), ("batch", "gloo")],
    ]
    ours = rows[3]
    assert (ours["replicas"], ours["hosts"], ours["steps"]) == (8, 2, 40)
    assert ours["alone_path_us"] > ours["alone_captain_us"] > ours["alone_member_us"] > 0
    assert all(row["wall_us"] > 0 for row in rows)
