"""Summaries and records."""

import json
import math
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_load import record as records
from millrace_load.record import Record, Summary, command, hardware, percentile, print_record, print_row, versions

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
    print_record(
        Record(
            "x",
            {"path": Path("/a"), "model": records.ROOT / "models/tiny", "n": 3},
            {"nan": math.nan, "list": (1, 2.5), "ok": True, "text": f"{records.ROOT}/a b"},
        )
    )
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    record = json.loads(out)
    assert record["config"] == {"path": "/a", "model": "models/tiny", "n": 3}
    assert record["results"] == {"nan": None, "list": [1, 2.5], "ok": True, "text": "a b"}
    assert record["hardware"] == hardware()
    assert record["versions"] == versions()
    assert record["command"] == command() != ""


def test_a_row_is_one_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_row("smg", "half", ms={"p50": 1.23456, "p99": math.nan}, streams=128, exact=True, why=None)
    assert capsys.readouterr().out == "smg  half  ms (p50 1.235, p99 nan)  streams 128  exact True  why None\n"


def test_a_checkout_has_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.delenv("MILLRACE_COMMIT", raising=False)
    assert "commit" not in versions()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init"], ["commit", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert len(versions()["commit"]) >= 7 and head.startswith(versions()["commit"])


@pytest.mark.parametrize("checkout", [False, True])
def test_a_copy_is_told_its_commit(checkout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its git may be that of another commit."""
    if not checkout:
        monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setenv("MILLRACE_COMMIT", "1234567")
    assert versions()["commit"] == "1234567"


# Power rises and falls again; the second GPU tells nothing of its power. The last line is cut off by the end.
READINGS = (
    "0, H200, 1980, 3201, 700.00, 90.50\n1, H200, 345, 3201, [N/A], [N/A]\n"
    "0, H200, 1380, 3201, 700.00, 690.25\n1, H200, 345, 3201, [N/A], [N/A]\n"
    "0, H200, 1980, 3201, 700.00, 120.00\n1, H2"
)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in, which writes all readings at once when it is asked to go on; the file appears when it has."""
    script, done = tmp_path / "nvidia-smi", tmp_path / "done"
    (tmp_path / "readings").write_text(READINGS)
    script.write_text(
        "#!/bin/sh\ncase $* in\n"
        f"*loop*) cat {tmp_path}/readings; touch {done}; exec sleep 60;;\n"
        f"*) head -n 2 {tmp_path}/readings;;\nesac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return done


def test_a_record_says_what_each_gpu_did(nvidia_smi: Path) -> None:
    first, second = json.loads(Record("x", {}, {}).to_json())["gpus"]
    assert first == {
        "index": 0, "name": "H200", "sm_mhz": 1980.0, "memory_mhz": 3201.0, "power_limit_w": 700.0, "power_w": 90.5,
    }  # fmt: skip
    assert second["power_w"] is None and second["power_limit_w"] is None
    assert hardware().startswith("2 x H200, ")


def test_gpus_of_other_processes_are_left_out(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert hardware().startswith("1 x H200, ") and [gpu["index"] for gpu in records.gpus()] == [1]


def test_the_clock_is_that_of_the_most_power(nvidia_smi: Path) -> None:
    with records.busiest_gpus() as found:
        while not nvidia_smi.exists():
            time.sleep(0.01)
        assert found == []
    assert [(gpu["index"], gpu["sm_mhz"], gpu["power_w"]) for gpu in found] == [(0, 1380.0, 690.25), (1, 345.0, None)]


def test_without_a_driver_there_are_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with records.busiest_gpus() as found:
        assert records.gpus() == []
    assert found == []


def test_hardware_and_versions_name_something() -> None:
    assert "cores of " in hardware()
    assert {"python", "millrace", "grpcio"} <= set(versions())
