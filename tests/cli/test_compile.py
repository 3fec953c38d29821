"""`millrace compile` starts the ranks of a worker and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from millrace_testing.paths import TINY


def compile_caches(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from millrace_cli.__main__ import main; main()"
    command = [sys.executable, "-c", code, "compile", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_config_alone_is_enough(tmp_path: Path) -> None:
    shutil.copy(TINY / "config.json", tmp_path)
    sets = ("--set", f"cache_dir={tmp_path / 'caches'}", "--set", "graphs=on", "--set", "limits.max_running=2")
    result = compile_caches("--model", str(tmp_path), "--random-weights", *sets)
    assert result.returncode == 0, result.stderr
    assert "capture" in result.stdout and "load" in result.stdout
    assert all(name in result.stdout for name in ("triton", "deep_gemm", "flashinfer", str(tmp_path / "caches")[:40]))
    assert "graphs captured buckets=1,2" in result.stderr


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    wrong = compile_caches("--model", str(tmp_path), "--set", "colour=red")
    assert wrong.returncode == 2 and "colour: unknown key" in wrong.stderr and "Traceback" not in wrong.stderr
    missing = compile_caches("--model", str(tmp_path), "--random-weights")
    assert missing.returncode == 1 and "config.json: no such file" in missing.stderr.splitlines()[-1]
