"""Our engine beside another: which rows count, and a round of ours on a CPU."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from millrace_bench.peers import engines


def test_the_best_row_of_a_case_counts() -> None:
    rows = [{"case": "a", "ms": 3.0, "name": "x"}, {"case": "a", "ms": 2.0, "name": "y"}, {"case": "b", "ms": 9.0}]
    assert {case: row["ms"] for case, row in engines.best(rows).items()} == {"a": 2.0, "b": 9.0}
    assert {case: row["ms"] for case, row in engines.best(rows[::-1]).items()} == {"a": 2.0, "b": 9.0}


def test_rows_of_sglang_are_read_as_they_are() -> None:
    rows = [
        {"name": "A", "case": "prefill:4:4096:3", "prefill_ms": 1537.0, "gpu_ms": 1500.0, "page": 64},
        {"name": "A", "case": "one:1:1024:64", "prefill_ms": 175.0, "decode_ms": 18.9},
        {"name": "B", "case": "decode:128:4096:16", "step_ms": 62.1, "step_nosync_ms": 62.5},
        {"name": "C", "case": "decode:256:2048:16", "step_ms": 74.3, "step_nosync_ms": 73.0},
        {"name": "C", "case": "decode:1:4096:32", "error": "skipped: KV pool too small"},
        {"name": "own", "case": "decode 1x4096", "ms": 19.1},
    ]
    assert engines.peer_rows(map(json.dumps, rows)) == [
        {"name": "A", "case": "prefill 4x4096", "ms": 1537.0},
        {"name": "A", "case": "decode 1x1024", "ms": 18.9},
        {"name": "B", "case": "decode 128x4096", "ms": 62.1},
        {"name": "C", "case": "decode 256x2048", "ms": 73.0},
        {"name": "own", "case": "decode 1x4096", "ms": 19.1},
    ]


@pytest.mark.parametrize("case", ["decode 1x4096", "mixed:1:4096:3", "decode:1:4096"])
def test_a_row_of_no_known_form_is_named(case: str) -> None:
    with pytest.raises(ValueError, match=f"case '{case}' of the peer.*:STEPS with prefill, one, decode"):
        engines.peer_rows([json.dumps({"name": "x", "case": case, "step_ms": 1.0})])


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
    cases = ["decode 1x1024", "decode 256x2048", "prefill 16x1024"]
    args = argparse.Namespace(
        rounds=2, peer=command, peer_rows=rows, limit_s=math.inf, cases=cases, layers=2, tiny=True
    )
    found = {row["case"]: row for row in engines.run(args)}
    assert list(found) == cases
    assert all(len(row["ours"]) == 2 and min(row["ours"]) > 0 for row in found.values())
    assert found["decode 1x1024"]["peer"] == [1e6, 1e6] and found["decode 1x1024"]["ratio"] > 1
    lines = capfd.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in lines] == (["ours"] * 3 + ["peer"]) * 2


def test_no_round_begins_that_ends_behind_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    row = json.dumps({"case": "decode 1x1024", "ms": 1.0})
    clock = iter((0.0, 30.0, 61.0))
    monkeypatch.setattr(engines.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(engines.subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess(args, 0, row))
    args = argparse.Namespace(rounds=3, peer="", peer_rows=None, limit_s=90.0, cases=engines.CASES, layers=1, tiny=True)
    assert [found["ours"] for found in engines.run(args)] == [[1.0, 1.0]]
