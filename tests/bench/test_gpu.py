"""The stages of a GPU's and of a host's verification: how they are run, and that each bench takes its command line."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from millrace_bench import figures, gpu, node, stages
from millrace_bench.stages import Stage
from millrace_cli.cluster import LOG_DIR
from millrace_testing.procs import gone
from rich.console import Console

TALKS = f"""
import json, os
print("begins")
print(json.dumps({{"results": {{"rows": [1, 2]}}}}))
print(os.environ["{LOG_DIR}"])
"""
FAILS = "raise SystemExit('there is no device')"
HANGS = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1); print(p.pid); p.wait()"
)


class Parsed(Exception):
    pass


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module that a stage can name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def quiet() -> Console:
    return Console(quiet=True)


def test_every_stage_runs_whatever_became_of_those_before(tmp_path: Path, module: Any) -> None:
    found = stages.run(
        [
            Stage("fails", module("fails", FAILS), 60, "nothing"),
            Stage("talks", module("talks", TALKS), 60, "5 ms", "rows"),
            Stage("lacks", "talks", 60, "", "shard"),
        ],
        tmp_path / "out",
        100,
        quiet(),
    )
    assert [(one.stage, one.passed) for one in found] == [("fails", False), ("talks", True), ("lacks", True)]
    assert found[0].result == "exit code 1; there is no device" and found[1].result == "2 rows"
    assert found[2].result.startswith("its JSON lacks UndefinedError: ")
    assert json.loads((tmp_path / "out" / "talks.json").read_text()) == {"results": {"rows": [1, 2]}}
    log = (tmp_path / "out" / "talks.log").read_text().splitlines()
    assert log[0] == "begins" and log[-1] == str(tmp_path / "out" / "logs" / "talks")
    assert "there is no device" in (tmp_path / "out" / "fails.log").read_text()


def test_a_stage_keeps_what_gpus_did_meanwhile(tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "busiest_gpus", lambda: contextlib.nullcontext([{"index": 0, "power_w": 690.0}]))
    stages.run_one(Stage("talks", module("talks", TALKS), 60), tmp_path, 60)
    assert json.loads((tmp_path / "talks.json").read_text())["gpus"] == [{"index": 0, "power_w": 690.0}]


async def test_a_stage_ends_at_its_limit_with_all_that_it_started(tmp_path: Path, module: Any) -> None:
    (found,) = stages.run([Stage("hangs", module("hangs", HANGS), 6)], tmp_path, 100, quiet())
    assert not found.passed and found.result.startswith("stopped at its limit of 6 s; ")
    with contextlib.suppress(psutil.NoSuchProcess):
        await gone([psutil.Process(int((tmp_path / "hangs.log").read_text()))])


def test_a_failure_shows_the_logs_of_its_workers(tmp_path: Path, module: Any) -> None:
    starts = (
        f"import os, pathlib; folder = pathlib.Path(os.environ['{LOG_DIR}']) / 'cluster'; folder.mkdir(parents=True)"
    )
    module("cluster", f"{starts}; (folder / 'decode-0.log').write_text('out of memory'); raise SystemExit('late')")
    console = Console(file=io.StringIO(), width=200)
    stages.run([Stage("cluster", "cluster", 60)], tmp_path / "out", 100, console)
    shown = console.file.getvalue()
    assert "cluster.log:\n    late" in shown and "decode-0.log:\n    out of memory" in shown


def test_no_stage_begins_without_time(tmp_path: Path, module: Any) -> None:
    (found,) = stages.run([Stage("talks", module("talks", TALKS), 60)], tmp_path, 0, quiet())
    assert (found.passed, found.result) == (False, "no time was left")


def test_the_table_shows_what_every_stage_says() -> None:
    outcome = stages.Outcome("shard", 12.3, True, "4.04 ms", "4.5 ms", {"results": {}})
    console = Console(width=100, file=io.StringIO())
    console.print(stages.table([outcome]))
    assert console.file.getvalue().split("\n")[-3].split() == ["shard", "12", "ok", "4.04", "ms", "4.5", "ms"]
    assert stages.results([outcome])[0] == {
        "stage": "shard", "seconds": 12.3, "passed": True, "result": "4.04 ms", "target": "4.5 ms"
    }  # fmt: skip


MODEL = Path("a folder")
NODE = [stage for gpus in node.WIDTHS for stage in node.stages(node.Host(gpus, 61, MODEL))]
ALL = [stage.command for stage in (*gpu.STAGES, *gpu.small_stages(), *gpu.stages_of_tests(), *NODE)]
ALL += node.small_stages(MODEL).values()


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # other tests have imported it
@pytest.mark.parametrize("command", sorted({*ALL}))
def test_each_command_line_is_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo would cost a GPU's time: modules parse their arguments, and run no further."""
    name, *arguments = shlex.split(command)
    if name == "pytest":
        (path,) = (argument for argument in arguments if argument.startswith("tests/"))
        assert (stages.ROOT / path).is_file()
        return
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        raise Parsed(parse(parser, args, namespace))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(Parsed):
        runpy.run_module(name, run_name="__main__", alter_sys=False)


def test_small_stages_are_those_of_a_gpu() -> None:
    names = [stage.name for stage in gpu.STAGES]
    assert len(set(names)) == len(names) and set(gpu.SMALL) <= set(names)
    assert set(names) - set(gpu.SMALL) == {"startup-v3", "tune"}


def test_small_stages_are_those_of_a_host() -> None:
    names = [stage.name for stage in node.stages(node.Host(8, 61, MODEL))]
    assert len(set(names)) == len(names)
    assert set(names) - set(node.small_stages(MODEL)) == {"tokens", "lost", "deepep", "ttft-8192"}


def test_a_real_stage_through_the_command(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "millrace_bench.gpu",
        "--tiny",
        "--only",
        "kernels-sampling",
        "--out",
        str(tmp_path),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)["results"]["stages"]
    assert row["passed"] and row["result"].endswith("rows") and "kernels-sampling" in result.stderr
    assert json.loads((tmp_path / "gpu.json").read_text())["bench"] == "gpu"
    assert json.loads((tmp_path / "kernels-sampling.json").read_text())["bench"] == "kernels"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_all_stages_of_a_host_over_small_shapes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "millrace_bench.node", "--tiny", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert result.returncode == 0, result.stderr
    found = {row["stage"]: row for row in json.loads(result.stdout)["results"]["stages"]}
    assert set(found) == set(node.small_stages(MODEL)) and all(row["passed"] for row in found.values())
    assert "NaN" not in str(found) and "lacks" not in str(found)


REPLICAS = {"exchange": "peer", "count": 256, "length": 2048, "accept": 2.0, "spare": 1}
FIGURES = {
    "logits": ({"rows": [{"weights": "FP8", "path": "prompt", "median": 0.026}]}, "FP8 prompt 0.0260"),
    "evaluation": (
        {"rows": [{"system": "engine FP8", "all": {"accuracy": 0.99, "low": 0.97, "high": 1.0}}]},
        "engine FP8 0.990 [0.970, 1.000]",
    ),
    "engine": (
        {
            "rows": [
                {"kind": "start"},
                {"kind": "decode", "variant": "graph", "step_ms": 4.111, "idle": 0.021, "exact": True},
                {"kind": "capture", "variant": "graph", "gc_off_s": 1.5, "gc_on_s": 9.5},
                {"kind": "collector", "variant": "graph", "frozen_ms": 0.02, "thawed_ms": 350.4},
                {"kind": "ratio", "variant": "graph", "speedup": 9.5},
            ]
        },
        "graph 4.11 ms, idle 2.1%, equal to eager; graph captured in 1.5 s, with the collector on 9.5 s; "
        "a collection 0.0 ms, thawed 350 ms; graph x9.50",
    ),
    "drafts": (
        {
            "rows": [
                {"kind": "start", "drafts": 0},
                {"kind": "decode", "drafts": 0, "batch": 1, "step_ms": 4.0, "accept": 1.0},
                {"kind": "decode", "drafts": 1, "batch": 1, "step_ms": 4.5, "accept": 1.85, "exact": False},
                {"kind": "ratio", "drafts": 1, "batch": 1, "speedup": 1.644},
            ]
        },
        "0 drafts 4.00 ms for 1.00 tokens, x1.00; 1 drafts 4.50 ms for 1.85 tokens, x1.64, NOT EQUAL to eager",
    ),
    "drafts_sweep": (
        {
            "rows": [
                {"kind": "decode"},
                {"kind": "best", "batch": 1, "drafts": 2, "speedup": 1.61},
                {"kind": "best", "batch": 8, "drafts": 1, "speedup": 1.2},
                {"kind": "draft_batches", "most": [8, 1]},
            ]
        },
        "1: 2 drafts x1.61, 8: 1 drafts x1.20; draft_batches [8, 1]",
    ),
    "drafts_serving": (
        {"rows": [{"drafts": 0, "tpot_ms": 14.8, "speedup": 1.0}, {"drafts": 3, "error": "not done after 250 s"}]},
        "0 drafts TPOT 14.8 ms x1.00, 3 drafts not done after 250 s",
    ),
    "shard": (
        {"rows": [{"kind": "decode", "count": 1, "length": 1024, "kv_dtype": "float8_e4m3fn", "ms": 4.044}]},
        "decode 1x1024 FP8 KV 4.04 ms",
    ),
    "replicas": (
        {
            "rows": [
                {**REPLICAS, "kind": "decode", "drafts": 0, "skew": "even", "ms": 62.44, "tokens_per_s": 32800},
                {**REPLICAS, "kind": "decode", "drafts": 1, "skew": "even", "ms": 70.0, "tokens_per_s": 50000},
                {**REPLICAS, "kind": "prefill", "drafts": 0, "skew": "power law", "ms": 80.0, "tokens_per_s": 9},
                {
                    **REPLICAS,
                    "kind": "decode",
                    "drafts": 0,
                    "skew": "power law",
                    "ms": 80.0,
                    "tokens_per_s": 9,
                    "imbalance": [2.0, 1.25],
                },
            ]
        },
        "peer decode 256x2048: 62.4 ms, 32,800 tokens/s; "
        "peer decode 256x2048, 1 drafts, ITL 35.0 ms: 70.0 ms, 50,000 tokens/s; "
        "peer prefill 256x2048, power law, 1 spare: 80.0 ms, 9 tokens/s; "
        "peer decode 256x2048, power law, 1 spare (busiest rank x2.00, then x1.25): 80.0 ms, 9 tokens/s",
    ),
    "ranks": (
        {
            "rows": [
                {"exchange": "none", "kind": "decode", "count": 2, "length": 9, "ms": 3.0, "communication": 0.0},
                {"exchange": "peer", "kind": "decode", "count": 2, "length": 9, "ms": 4.0, "communication": 0.25},
            ]
        },
        "none decode 2x9 3.00 ms; peer decode 2x9 4.00 ms, 25% communication",
    ),
    "sums": (
        {
            "rows": [
                {"kind": "start"},
                {"kind": "decode", "sums": "fused", "drafts": 3, "step_ms": 6.5, "tokens_per_s": 400.2},
            ]
        },
        "fused 3 drafts 6.50 ms, 400 tokens/s",
    ),
    "first_token": (
        {"batches": [{"ttft": 0.06, "errors": 0}, {"ttft": 0.05, "errors": 0}, {"ttft": 0.09, "errors": 1}]},
        "TTFT p50 60 ms, 1 failed",
    ),
    "serving": (
        {"input_token_throughput": 90000.4, "output_token_throughput": 175.0, "completed": 9998, "errors": {"LOST": 2}},
        "90,000 prompt and 175 output tokens/s, 9998 answers, 2 failed",
    ),
    "startup": (
        {"rows": [{"caches": "cold", "ready_s": 99.6}, {"caches": "warm", "ready_s": 30.2}]},
        "cold 100 s, warm 30 s",
    ),
    "handover": (
        {"transfer_ms": {"p50": 3.34}, "handover_ms": {"p50": 4.0}, "equal_to_unified": 8, "prompts": 8},
        "transfer 3.34 ms, hand-over 4.00 ms, 8 of 8 equal to unified",
    ),
    "absorb": (
        {
            "rows": [
                {"op": "mla_absorb.absorb_q", "shape": "T=1 H=16", "impl": "in use", "us": 3.0},
                {"op": "mla_absorb.absorb_q", "shape": "T=1 H=128", "impl": "in use", "us": 6.9},
                {"op": "mla_absorb.absorb_q", "shape": "T=1 H=128", "impl": "fp8 grouped", "us": 12.34},
                {"op": "mla_absorb.absorb_q", "shape": "T=1 H=128", "impl": "fp8 batched", "us": 1.0, "error": "no"},
                {"op": "mla_absorb.project_v", "shape": "T=1 H=128", "impl": "in use", "us": 7.5},
            ]
        },
        "5 rows, 1 with an error; T=1 in use 6.9, fp8 grouped 12.3 us",
    ),
    "moe": (
        {
            "rows": [
                {"shape": "T=512 TP8", "impl": "packed", "us": 400.4},
                {"shape": "T=512 TP8", "impl": "grouped, untuned", "us": 800.2},
                {"shape": "T=512 TP8", "impl": "indexed", "us": 1.0, "error": "refused"},
            ]
        },
        "3 rows, 1 with an error; T=512 TP8: packed 400 us, untuned 800 us",
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_what_the_table_says_of_a_bench(name: str) -> None:
    results, text = FIGURES[name]
    assert figures.said(name, results) == text
