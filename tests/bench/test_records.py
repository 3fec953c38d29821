"""Every bench ends in one JSON line of the same shape. (test_serving.py has that of `serving`.)"""

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

RecordOf = Callable[..., dict[str, Any]]


@pytest.fixture
def record_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RecordOf:
    """What a bench ends with, run in this process."""

    def run(bench: str, *arguments: str) -> dict[str, Any]:
        module = f"millrace_bench.{bench}"
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        monkeypatch.setattr(sys, "orig_argv", ["python", "-m", module, *arguments])
        try:
            importlib.import_module(module).main()
        except SystemExit as end:
            assert not end.code
        record = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert list(record) == ["bench", "config", "results", "hardware", "gpus", "versions", "command", "time"]
        assert record["bench"] == bench.partition(".")[0] and record["hardware"] and record["versions"]["python"]
        assert record["command"] == " ".join(["python", "-m", module, *arguments])
        return record

    return run


def test_transfer(record_of: RecordOf) -> None:
    record = record_of("transfer", "--pages-per-read", "1", "2", "--repeats", "2")
    config = {"pages_per_read": [1, 2], "repeats": 2, "ucx": {"NET_DEVICES": "lo"}, "devices": ["cpu", "cpu"]}
    assert record["config"] == config
    assert [row["pages"] for row in record["results"]["rows"]] == [1, 2, 1, 2]
    assert record["results"]["v3_gb_per_s"] > 0


def test_engine(record_of: RecordOf) -> None:
    record = record_of("engine", "--batches", "1", "2", "--steps", "5")
    decode = [row for row in record["results"]["rows"] if row["kind"] == "decode"]
    assert [row["batch"] for row in decode] == [1, 2] and all(row["step_us"] > 0 for row in decode)


@pytest.mark.long
def test_drafts(record_of: RecordOf) -> None:
    work = ["--tasks", "copy", "--num-items", "2", "--temperatures", "1", "--drafts", "2", "--tokens", "12"]
    text, copy = record_of("drafts", *work)["results"]["rows"]
    for row in (text, copy):
        assert (row["same"], row["items"], row["drafts"], row["temperature"]) == (2, 2, 2, 1.0)
        assert row["drafted"][0] >= row["drafted"][1] >= row["accepted"][1] and row["accepted"][0] >= row["accepted"][1]
    assert text["accept"] > 1 and copy["accept"] > 1.5, "the trained layer predicts what it copies"


def test_kernels(record_of: RecordOf) -> None:
    record = record_of("kernels.__main__", "--group", "dense", "attention", "--device", "cpu", "--quick")
    rows = record["results"]["rows"]
    assert record["config"]["capability"] == "cpu"
    wanted = {"fp8.fp8_linear", "fp8.small_linear", "fp8.quant_groups", "indexer.top_keys", "indexer.chosen_rows"}
    assert {row["op"] for row in rows} >= wanted
    assert all(row["us"] > 0 and row["gb_per_s"] > 0 and row["impl"] for row in rows)


def test_policy(record_of: RecordOf) -> None:
    record = record_of("policy", "--blocks", "1000", "--tokens", "512", "--requests", "20", "--memory-blocks", "5000")
    rows = record["results"]["decisions"]
    assert len({row["policy"] for row in rows}) == 8 and all(row["us"]["p50"] > 0 for row in rows)
    assert all(row["bytes_per_block"] > 16 for row in record["results"]["memory"])
