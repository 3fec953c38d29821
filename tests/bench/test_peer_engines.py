"""Our engine beside another: which rows count, and a round of ours on a CPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from millrace_bench.peers import engines


def test_the_best_row_of_a_case_counts() -> None:
    rows = [{"case": "a", "ms": 3.0, "name": "x"}, {"case": "a", "ms": 2.0, "name": "y"}, {"case": "b", "ms": 9.0}]
    assert {case: row["ms"] for case, row in engines.best(rows).items()} == {"a": 2.0, "b": 9.0}
    assert {case: row["ms"] for case, row in engines.best(rows[::-1]).items()} == {"a": 2.0, "b": 9.0}


def test_ratios_are_of_medians() -> None:
    rows = engines.ratios({"a": [1.0, 9.0, 2.0], "b": [4.0]}, {"a": [3.0, 3.0, 50.0], "c": [1.0]})
    assert [(row["case"], row["ours_ms"], row.get("peer_ms"), row.get("ratio")) for row in rows] == [
        ("a", 2.0, 3.0, 1.5),
        ("b", 4.0, None, None),
    ]


@pytest.mark.long
def test_two_rounds_in_turns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The peer's rows of a round replace those of the round before."""
    rows, row = tmp_path / "rows.jsonl", {"name": "other", "case": "decode 1x1024", "ms": 1e6}
    script = tmp_path / "peer.py"
    script.write_text(f"open({str(rows)!r}, 'a').write({json.dumps(row)!r} + chr(10))")
    command = f"{sys.executable} {script}"
    args = argparse.Namespace(rounds=2, peer=command, peer_rows=rows, layers=2, tiny=True)
    found = {row["case"]: row for row in engines.run(args)}
    assert set(found) == {
        *(f"decode {size}" for size in engines.DECODE),
        *(f"prefill {size}" for size in engines.PREFILL),
    }
    assert all(len(row["ours"]) == 2 and min(row["ours"]) > 0 for row in found.values())
    assert found["decode 1x1024"]["peer"] == [1e6, 1e6] and found["decode 1x1024"]["ratio"] > 1
    lines = capfd.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in lines] == (["ours"] * 6 + ["peer"]) * 2
