"""The stages of a GPU's and of a host's verification: how they are run, and that each bench takes its command line."""

import argparse
import contextlib
import io
import json
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from millrace_bench import figures, gpu, node, stages
from millrace_bench.stages import Stage
from millrace_cli.cluster import LOG_DIR
from millrace_testing.paths import TINY
from millrace_testing.procs import gone
from rich.console import Console

TALKS = f"""
import json, os
print("begins")
print(json.dumps({{"results": {{"rows": [1, 2]}}}}))
print(os.environ["{LOG_DIR}"])
"""
FAILS = "raise SystemExit('there is no device')"
HANGS = """
import subprocess, sys
process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)
print(process.pid, flush=True)
process.wait()
"""


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
            Stage("refuses", module("refuses", """print('{"results": {"errors": {"QUEUE_FULL": 1}}}')"""), 60),
        ],
        tmp_path / "out",
        100,
        quiet(),
    )
    assert {one.stage: one.passed for one in found} == {"fails": False, "talks": True, "lacks": True, "refuses": False}
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


async def test_stage_ends_at_its_limit_with_all_it_started(
    tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Popen(subprocess.Popen[bytes]):
        """Its time is over as soon as it has said what it started."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            assert timeout == 6
            while not (tmp_path / "hangs.log").read_text().endswith("\n"):
                assert self.poll() is None
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Popen)
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


MODEL = TINY
NODE = [stage for gpus in node.WIDTHS for stage in node.stages(node.Host(gpus, 61, MODEL))]
ALL = [stage.command for stage in (*gpu.STAGES, *gpu.stages_of_tests(), *NODE)]
ALL += [stage.command for stage in stages.small_stages([*gpu.STAGES, *NODE])]


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


@pytest.mark.parametrize(
    ("found", "large"),
    [
        (gpu.STAGES, {"startup-v3", "tune"}),
        (node.stages(node.Host(8, 61, MODEL)), {"tokens", "lost", "deepep", "ttft-8192"}),
    ],
)
def test_small_stages_are_all_but_these(found: list[Stage], large: set[str]) -> None:
    names = {stage.name for stage in found}
    assert len(names) == len(found) and names - {small.name for small in stages.small_stages(found)} == large


def test_command_runs_the_stages_that_it_is_told_to(
    tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = {"bench": "kernels", "results": {"rows": [1]}}
    small = module("small", f"print({json.dumps(kernels)!r})")
    known = [replace(stage, tiny=small) if stage.name == "kernels-dense" else stage for stage in gpu.STAGES]
    monkeypatch.setattr(gpu, "STAGES", known)
    monkeypatch.setattr(sys, "argv", ["gpu", "--tiny", "--only", "kernels-dense", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        gpu.main()
    out, err = capsys.readouterr()
    assert stop.value.code == 0, err
    (row,) = json.loads(out)["results"]["stages"]
    assert row["passed"] and row["result"] == "1 rows" and "kernels-dense" in err
    assert json.loads((tmp_path / "gpu.json").read_text())["bench"] == "gpu"
    assert json.loads((tmp_path / "kernels-dense.json").read_text()) == kernels


@pytest.mark.long
def test_all_stages_of_a_host_over_small_shapes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "millrace_bench.node", "--tiny", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert result.returncode == 0, result.stderr
    found = {row["stage"]: row for row in json.loads(result.stdout)["results"]["stages"]}
    assert set(found) == {small.name for small in stages.small_stages(NODE)}
    assert all(row["passed"] for row in found.values())
    assert "NaN" not in str(found) and "lacks" not in str(found)


SAID = {  # of committed runs: how the line begins or ends
    "logits": ("h200/logits", "BF16 prompt 0.0050, BF16 outputs 0.0048"),
    "evaluation": ("h200/eval-matrix", "CPU FP32 1.000 [0.986, 1.000], CPU FP8 0.986"),
    "engine": ("h200/engine-tp8", "with the collector on 0.24 s; a collection 0.3 ms, thawed 144 ms; graph x22.70"),
    "drafts": ("h200/drafts-tp8", "3 drafts 7.39 ms for 2.50 tokens, x1.34, equal to eager"),
    "drafts_sweep": ("h200/drafts-sweep-tp8", "1: 1 drafts x1.38, 4: 2 drafts x1.22"),
    "shard": ("h200/shard-ep8", "decode 128x4096 47.62 ms, decode 128x4096 FP8 KV 46.12 ms"),
    "replicas": ("h100/node-skew", "peer decode 128x4096, power law, 0 spare: 27.6 ms, 9,289 tokens/s; "),
    "ranks": ("h200/ranks", "peer decode 128x4096 52.16 ms, 7% communication; "),
    "sums": ("h100/node-tp", "fused 0 drafts 2.29 ms, 437 tokens/s, fused 3 drafts 4.71 ms, 530 tokens/s"),
    "first_token": ("h100/node-ttft-1600", "TTFT p50 60 ms, 0 failed"),
    "serving": ("h100/node-seeds-512-1", "51,862 prompt and 101 output tokens/s, 2500 answers, 0 failed"),
    "startup": ("h200/startup", "cold 106 s, warm 22 s"),
    "handover": ("h200/handover", "transfer 2.32 ms, hand-over 3.00 ms, 10 of 10 equal to unified"),
    "kernels": ("h200/kernels-dense", "224 rows"),
    "absorb": ("h200/kernels-absorb", "182 rows; T=1 in use 7.0, fp8 grouped 22.0, fp8 batched 11.3 us; T=4 in use"),
    "moe": ("h200/kernels-moe", "130 rows; T=512 TP8: triton.moe_grouped:moe_experts_fp8 464 us, untuned 456 us"),
    "onoff": ("h200/onoff", "A6 x1.21 to x1.92, G8 x1.05 to x1.11"),
    "rows": ("h200/exchange", "71 rows"),
}
FAULTS = {
    "engine": (
        {"kind": "decode", "variant": "graph", "step_ms": 4.1, "exact": False},
        "graph 4.10 ms, idle nan%, NOT EQUAL to eager",
    ),
    "kernels": ({"error": "no"}, "1 rows, 1 with an error"),
    "moe": ({"shape": "T=512 TP8", "impl": "indexed", "us": 1.0, "error": "no"}, "1 rows, 1 with an error"),
    "onoff": ({"seed": "M2", "failed": "RuntimeError"}, "M2 RuntimeError"),
}


@pytest.mark.parametrize("stage", SAID)
def test_the_table_shows_the_figures_of_a_bench(stage: str) -> None:
    run, text = SAID[stage]
    said = figures.said(stage, figures.results(run))
    assert said.startswith(text) or said.endswith(text), said


@pytest.mark.parametrize("stage", FAULTS)
def test_the_table_shows_what_failed_in_a_bench(stage: str) -> None:
    row, text = FAULTS[stage]
    assert figures.said(stage, {"rows": [row]}) == text


def test_every_stage_has_figures_that_are_known() -> None:
    """A stage without a template would say nothing."""
    assert {stage.figures for stage in (*gpu.STAGES, *NODE)} - {""} <= SAID.keys()
