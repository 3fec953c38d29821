"""Every bench ends in one JSON line of the same shape. (test_serving.py has that of `serving`.)"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e")]


def record_of(bench: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"millrace_bench.{bench}", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout.splitlines()[-1])
    assert list(record) == ["bench", "config", "results", "hardware", "gpus", "versions", "command", "time"]
    assert record["bench"] == bench and record["hardware"] and record["versions"]["python"]
    assert record["command"].endswith(" ".join([f"-m millrace_bench.{bench}", *arguments]))
    return record


@pytest.mark.long
def test_router() -> None:
    """With workers that transfer; test_router.py has the others."""
    load = ["--routers", "1", "--streams", "8", "--tokens", "30", "--requests", "3", "--step-ms", "1"]
    record = record_of("router", "--workers", "sim", *load)
    assert record["config"]["workers"] == "sim" and record["config"]["streams"] == 8
    found = record["results"]["routers"]["1"]
    assert found["tokens_per_s"] > 0 and found["ttft_ms"]["p50"] > 0 and found["requests_per_s"] > 0


def test_transfer() -> None:
    record = record_of("transfer", "--pages-per-read", "1", "2", "--repeats", "2")
    config = {"pages_per_read": [1, 2], "repeats": 2, "ucx": {"NET_DEVICES": "lo"}, "devices": ["cpu", "cpu"]}
    assert record["config"] == config
    assert [row["pages"] for row in record["results"]["rows"]] == [1, 2, 1, 2]
    assert record["results"]["v3_gb_per_s"] > 0


def test_engine() -> None:
    record = record_of("engine", "--batches", "1", "2", "--steps", "5")
    decode = [row for row in record["results"]["rows"] if row["kind"] == "decode"]
    assert [row["batch"] for row in decode] == [1, 2] and all(row["step_us"] > 0 for row in decode)


@pytest.mark.long
def test_drafts() -> None:
    work = ["--tasks", "copy", "--num-items", "2", "--temperatures", "1", "--drafts", "2", "--tokens", "12"]
    text, copy = record_of("drafts", *work)["results"]["rows"]
    for row in (text, copy):
        assert (row["same"], row["items"], row["drafts"], row["temperature"]) == (2, 2, 2, 1.0)
        assert row["drafted"][0] >= row["drafted"][1] >= row["accepted"][1] and row["accepted"][0] >= row["accepted"][1]
    assert text["accept"] > 1 and copy["accept"] > 1.5, "the trained layer predicts what it copies"


@pytest.mark.long
def test_drafts_serving() -> None:
    options = ["--widths", "tiny", "--layers", "2", "--input-len", "64", "--output-len", "24", "--num-requests", "2"]
    none, two = record_of("drafts_serving", *options, "--drafts", "0", "2")["results"]["rows"]
    assert none["accept"] == none["speedup"] == 1.0 and two["accept"] > 1.5
    assert none["completed"] == two["completed"] == 2 and two["tpot_ms"] > 0 and two["ttft_ms"] > 0


def test_kernels() -> None:
    record = record_of("kernels", "--group", "dense", "--device", "cpu", "--quick")
    rows = record["results"]["rows"]
    assert record["config"]["capability"] == "cpu"
    assert {row["op"] for row in rows} >= {"fp8.fp8_linear", "fp8.small_linear", "fp8.quant_groups"}
    assert all(row["us"] > 0 and row["gb_per_s"] > 0 and row["impl"] for row in rows)


def test_policy() -> None:
    record = record_of("policy", "--blocks", "1000", "--tokens", "512", "--requests", "20", "--memory-blocks", "5000")
    rows = record["results"]["decisions"]
    assert len({row["policy"] for row in rows}) == 8 and all(row["us"]["p50"] > 0 for row in rows)
    assert all(row["bytes_per_block"] > 16 for row in record["results"]["memory"])
