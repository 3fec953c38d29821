"""Summaries and records."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_bench.common import Record, Summary, command, hardware, percentile, print_record, versions

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


def test_percentiles_of_a_known_list() -> None:
    summary = Summary.of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (summary.mean, summary.p50) == (3.0, 3.0)
    assert summary.p90 == pytest.approx(4.6)
    assert summary.p99 == pytest.approx(4.96)


@given(NUMBERS)
def test_percentiles_ascend_and_stay_inside(values: list[float]) -> None:
    ordered = sorted(values)
    found = [percentile(ordered, q) for q in (0.0, 0.1, 0.5, 0.9, 1.0)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (ordered[0], ordered[-1])


def test_empty_summary_is_nan() -> None:
    assert math.isnan(Summary.of([]).p50)


def test_record_is_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_record(Record("x", {"path": Path("/a"), "n": 3}, {"nan": math.nan, "list": (1, 2.5), "ok": True}))
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    record = json.loads(out)
    assert record["config"] == {"path": "/a", "n": 3}
    assert record["results"] == {"nan": None, "list": [1, 2.5], "ok": True}
    assert record["hardware"] == hardware()
    assert record["versions"] == versions()
    assert record["command"] == command() != ""


def test_hardware_and_versions_name_something() -> None:
    assert "cores of " in hardware()
    assert {"python", "millrace", "grpcio"} <= set(versions())
