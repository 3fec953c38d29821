"""`millrace plan` on a machine without a GPU."""

from dataclasses import astuple
from pathlib import Path

import pytest
from millrace_bench.v3 import write_folder
from millrace_cli.errors import CommandError
from millrace_cli.plan import plan, split, workload
from millrace_common.config import load
from millrace_serve.engine.config import Role
from millrace_serve.engine.schedule.factory import UNKNOWN
from millrace_serve.engine.schedule.speeds import Speeds
from millrace_serve.plan import splits
from millrace_serve.plan.predict import StepRanks
from millrace_serve.plan.settings import AUTO_KEYS, Goal
from millrace_serve.worker import main
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.rank.model import expected_times


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("v3"), "v3", 61)


def test_a_plan_says_what_is_chosen_what_fits_and_how_long_it_takes(
    v3: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan(v3, "h200", (1, 8), Role.DECODE, Goal.THROUGHPUT, ["limits.max_model_len=8192", "redundant_experts=2"])
    text = capsys.readouterr().out
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert "float8_e4m3fn" in lines["kv_dtype"] and "h200/shard-ep8.json" in lines["kv_dtype"]
    assert "set; the plan has 0" in lines["redundant_experts"] and lines.keys() >= {*AUTO_KEYS}
    assert "sequences at once:" in text and "decode, ms" in text and "8 ranks exchange as 2" in text
    # A worker on such GPUs logs the same lines, but for memory, which it measures.
    monkeypatch.setattr(main, "gpu_here", lambda: "H200")
    items = ["role=decode", "goal=throughput", "device=cuda", f"model={v3}", "dp=8", "limits.max_model_len=8192"]
    with caplog.at_level("INFO"):
        main._log_plan(load(WorkerConfig, None, [*items, "redundant_experts=2"]))
    logged = caplog.records[-1].lines.splitlines()  # type: ignore[attr-defined]
    assert len(logged) > 15 and set(logged) <= set(text.splitlines())


def test_what_does_not_fit_is_refused_with_what_is_missing(v3: Path) -> None:
    with pytest.raises(CommandError, match=r"GiB are left of the budget .* after weights"):
        plan(v3, "H100", (8, 1), Role.UNIFIED, Goal.LATENCY, [])
    with pytest.raises(CommandError, match=r"limits\.max_running"):
        plan(v3, "H200", (1, 8), Role.UNIFIED, Goal.LATENCY, ["limits.max_running=0"])


@pytest.mark.parametrize(
    ("goal", "tp", "dp", "ranks"),
    [
        (Goal.LATENCY, None, None, (8, 2)),
        (Goal.BALANCED, None, None, (1, 16)),
        (Goal.BALANCED, 4, None, (4, 4)),
        (Goal.LATENCY, None, 16, (1, 16)),
        (Goal.THROUGHPUT, 2, 8, (2, 8)),
    ],
)
def test_the_layout_follows_from_the_goal(goal: Goal, tp: int | None, dp: int | None, ranks: tuple[int, int]) -> None:
    assert split(16, goal, tp, dp) == ranks


@pytest.fixture(scope="module")
def e32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("e32"), "e32", 61)


LIMITS, CONTEXT = "ttft=1,tpot=0.04", ["limits.max_model_len=8192"]


@pytest.mark.parametrize(("gpus", "rate", "best"), [(4, 5, "3 prefill + 1 decode"), (4, 0.1, "3 prefill + 1 decode")])
def test_the_best_split_stands_first_and_its_neighbours_below(
    e32: Path, gpus: int, rate: float, best: str, capsys: pytest.CaptureFixture[str]
) -> None:
    workload(e32, "h200", gpus, (None, None), f"4096/256@{rate}", LIMITS, CONTEXT)
    title, _, first, _, heads, *rows = capsys.readouterr().out.splitlines()
    assert "4 workers of 1 x H200" in title and first.startswith(f"best: {best};")
    assert heads.split() == ["split", "goodput", "TTFT", "TPOT"]
    goodput = {row[:24].strip(): float(row[24:].split("/s")[0]) for row in rows}
    assert len(goodput) == gpus and max(goodput.values()) == goodput[best] <= rate


def test_a_split_is_of_whole_workers(v3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload(v3, "H200", 16, (None, None), "1024/64@1", LIMITS, CONTEXT)
    rows = capsys.readouterr().out.splitlines()[5:]
    assert [row[:20].strip() for row in rows] == ["1 prefill + 1 decode", "2 unified"]


@pytest.mark.parametrize(
    ("gpu", "gpus", "asked", "slo", "message"),
    [
        *(
            ("H200", 8, text, LIMITS, f"--workload: '{text}' is not of the form")
            for text in ("4096@1", "0/3@1", "4/4@x")
        ),
        *(("H200", 8, "4/4@1", text, f"--slo: '{text}' is none of") for text in ("ttft=0", "tpot", "latency=1")),
        ("H200", 1, "4/4@1", LIMITS, "--gpus 1: must be two or more workers"),
    ],
)
def test_a_bad_workload_is_named(e32: Path, gpu: str, gpus: int, asked: str, slo: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        workload(e32, gpu, gpus, (None, None), asked, slo, CONTEXT)


def test_gpus_that_nobody_has_timed_are_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="--gpu H200: this model's steps were not timed"):
        workload(write_folder(tmp_path / "tiny", "tiny", 2), "H200", 8, (None, None), "4/4@1", LIMITS, [])


@pytest.mark.parametrize(
    ("device", "gpu", "known"), [("cuda", "H200", True), ("cuda", "", False), ("cpu", "H200", False)]
)
def test_a_worker_begins_with_the_times_of_steps_that_the_plan_predicts(
    e32: Path, device: str, gpu: str, known: bool
) -> None:
    config = load(WorkerConfig, None, [f"model={e32}", f"device={device}", "role=flexible", *CONTEXT])
    times = expected_times(config, gpu)
    assert times == (splits.times(StepRanks("H200", "ep8", 1, 61)) if known else UNKNOWN) and times.known is known
    assert Speeds(times).measured == (astuple(times) if known else ())
