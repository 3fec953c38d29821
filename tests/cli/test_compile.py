"""`millrace compile` starts the ranks of a worker and nothing else."""

import os
import shutil
from pathlib import Path

import pytest
import yaml
from millrace_bench.v3 import write_folder
from millrace_cli import compile as command
from millrace_cli.compile import fill, settings
from millrace_cli.errors import CommandError
from millrace_common.config import load
from millrace_serve.engine.config import Role
from millrace_serve.worker.config import WorkerConfig
from millrace_testing import inside
from millrace_testing.paths import TINY


@pytest.fixture(autouse=True)
def ranks_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "make_launcher", lambda kind: inside.Threads())


async def test_config_alone_is_enough(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copy(TINY / "config.json", tmp_path)
    sets = [f"model={tmp_path}", f"cache_dir={tmp_path / 'caches'}", "graphs=on", "limits.max_running=2"]
    await fill(None, sets, dict(os.environ), random_weights=True)
    shown = capfd.readouterr()
    assert "capture" in shown.out and "load" in shown.out
    assert all(name in shown.out for name in ("triton", "deep_gemm", "flashinfer", str(tmp_path / "caches")[:40]))
    assert "graphs captured buckets=1,2" in shown.err


async def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"could not start: .*config\.json: no such file") as missing:
        await fill(None, [f"model={tmp_path}"], dict(os.environ), random_weights=True)
    assert missing.value.code == 1


def test_caches_are_of_the_worker_that_comes(tmp_path: Path) -> None:
    """The chart warms each pool from its own file; the weights of the job are random, those of the worker are not."""
    model, file = write_folder(tmp_path / "v3", "v3", 61), tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"role": "prefill", "device": "cuda", "dp": 8, "model": str(model)}))
    worker, warm = load(WorkerConfig, file), settings(file, [], random_weights=True)
    assert worker.limits.draft_tokens > 0 and worker.redundant_experts == 1
    assert (warm.role, warm.random_weights) == (Role.UNIFIED, True)
    assert warm.model_copy(update={"role": worker.role, "random_weights": False}) == worker
    assert settings(None, [f"model={model}"], random_weights=False).role is Role.UNIFIED
    assert settings(file, ["role=decode"], random_weights=False).role is Role.DECODE
