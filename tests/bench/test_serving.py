"""A load run against a real router with simulated workers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from millrace_bench.serving import Settings, parse


def test_options_are_the_fields() -> None:
    settings = parse(["--api", "http", "--num-requests", "5", "--input-len", "1:9", "--unified", "--slo", "ttft=1"])
    assert settings == Settings(api="http", num_requests=5, input_len="1:9", unified=True, slo="ttft=1")
    assert parse([]) == Settings()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-requests", "0"], "num_requests must be at least 1"),
        (["--concurrency", "0"], "concurrency must be at least 1"),
        (["--request-rate", "-1"], "request_rate must be at least 0"),
        (["--input-len", "5:2"], "length '5:2'"),
        (["--output-len", "many"], "length 'many'"),
        (["--shared-prefix", "3"], "shared prefix '3'"),
        (["--slo", "speed=1"], "ttft, tpot and e2e"),
        (["--api", "smtp"], "smtp"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.e2e
@pytest.mark.xdist_group("e2e")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--api", "grpc", "--concurrency", "8", "--ignore-eos", "--shared-prefix", "1:64", "--seed", "3"],
        ["--api", "http", "--request-rate", "100", "--ignore-eos"],
    ],
    ids=["closed loop over grpc", "open loop over http"],
)
def test_a_whole_run(arguments: list[str]) -> None:
    common = ["--self-serve", "--engine", "sim", "--num-requests", "30", "--warmup", "4"]
    lengths = ["--input-len", "80:120", "--output-len", "16"]
    command = [sys.executable, "-m", "millrace_bench.serving", *common, *lengths, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    record: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    figures = record["results"]
    assert figures["errors"] == {}
    assert (figures["completed"], figures["output_tokens"]) == (30, 30 * 16)
    assert figures["prompt_tokens"] >= 30 * 80
    assert 0 < figures["ttft"]["p50"] <= figures["e2e"]["p50"]
    assert record["config"]["target"]["model"] == "tiny"
    assert "goodput" in figures
    assert "TTFT" in result.stderr
