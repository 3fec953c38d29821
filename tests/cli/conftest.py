"""Clusters of stand-in processes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from millrace_cli.cluster import ClusterSpec
from millrace_testing.command import millrace  # noqa: F401

STANDIN = Path(__file__).with_name("standin.py")


def standin_command(role: str) -> list[str]:
    return [sys.executable, str(STANDIN), role]


@pytest.fixture
def make_spec(tmp_path: Path) -> Callable[..., ClusterSpec]:
    def make(**changes: Any) -> ClusterSpec:
        defaults = {"log_dir": tmp_path / "logs", "command": standin_command, "stop_grace_s": 5, "start_timeout_s": 30}
        return ClusterSpec(**{**defaults, **changes})

    return make


@pytest.fixture
def wait_gone() -> Callable[[list[int]], None]:
    """Wait until none of the processes runs; the test fails when one stays."""

    def wait(pids: list[int]) -> None:
        found = []
        for pid in pids:
            try:
                found.append(psutil.Process(pid))
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(found, timeout=120)
        running = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert not running, f"still there: {running}"

    return wait
