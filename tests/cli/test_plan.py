"""`millrace plan` on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from millrace_bench.v3 import write_folder
from millrace_cli.errors import CommandError
from millrace_cli.plan import plan, split
from millrace_common.config import load
from millrace_serve.engine.config import Role
from millrace_serve.plan.settings import Goal
from millrace_serve.worker import main
from millrace_serve.worker.config import WorkerConfig


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
    assert "set; the plan has 0" in lines["redundant_experts"]
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
    with pytest.raises(CommandError, match="--gpu: 'A100' is none of H100, H200"):
        plan(v3, "A100", (8, 1), Role.UNIFIED, Goal.LATENCY, [])
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


def test_a_layout_has_as_many_ranks_as_gpus() -> None:
    with pytest.raises(CommandError, match="--gpus 16: is not tp 3 x dp 5"):
        split(16, Goal.BALANCED, 3, None)
