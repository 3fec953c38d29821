"""`millrace compile` starts the ranks of a worker and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from millrace_bench.v3 import write_folder
from millrace_cli.compile import fill, settings
from millrace_cli.errors import CommandError
from millrace_common.config import load
from millrace_serve.engine.config import Role
from millrace_serve.worker.config import WorkerConfig
from millrace_testing.paths import TINY


def test_config_alone_is_enough(tmp_path: Path) -> None:
    shutil.copy(TINY / "config.json", tmp_path)
    sets = ("--set", f"cache_dir={tmp_path / 'caches'}", "--set", "graphs=on", "--set", "limits.max_running=2")
    command = [sys.executable, "-m", "millrace_cli", "compile", "--model", str(tmp_path), "--random-weights", *sets]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "capture" in result.stdout and "load" in result.stdout
    assert all(name in result.stdout for name in ("triton", "deep_gemm", "flashinfer", str(tmp_path / "caches")[:40]))
    assert "graphs captured buckets=1,2" in result.stderr


async def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="colour: unknown key") as wrong:
        settings(None, [f"model={tmp_path}", "colour=red"], random_weights=False)
    assert wrong.value.code == 2
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
