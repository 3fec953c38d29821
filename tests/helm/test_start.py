"""start.sh: the environment that the preflight found, and who does what in a group."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from millrace_chart.render import CHART

SCRIPT = CHART / "files" / "start.sh"
SAY = "import os, sys; print('worker', sys.argv[1:], os.environ.get('UCX_TLS'))"


@pytest.fixture
def pod(tmp_path: Path) -> dict[str, str]:
    """Environment of a pod where `ray` says how it was called, and python3 is ours."""
    tools, modules, shared = tmp_path / "bin", tmp_path / "modules", tmp_path / "run"
    for folder in (tools, modules, shared):
        folder.mkdir()
    (tools / "ray").write_text('#!/bin/sh\necho ray "$@"\n')
    (tools / "find").write_text("#!/bin/sh\n")  # /dev/shm is not ours here
    (tools / "python3").symlink_to(sys.executable)
    for tool in ("ray", "find"):
        (tools / tool).chmod(0o755)
    (modules / "fake_worker.py").write_text(SAY)
    (shared / "fabric.env").write_text("UCX_TLS='^tcp'\n")
    path = f"{tools}:/usr/bin:/bin"
    return {"PATH": path, "PYTHONPATH": str(modules), "MILLRACE_RUN": str(shared), "RAY_FLAGS": "--num-cpus=8"}


def run(pod: dict[str, str], *arguments: str, **more: str) -> list[str]:
    done = subprocess.run(
        ["sh", str(SCRIPT), *arguments], env={**pod, **more}, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def test_a_single_pod_is_the_worker(pod: dict[str, str]) -> None:
    assert run(pod, "run", "fake_worker", "--config", "a b") == ["worker ['--config', 'a b'] ^tcp"]


def test_the_leader_of_a_group_is_rays_head_and_the_worker(pod: dict[str, str]) -> None:
    lines = run(pod, "run", "fake_worker", "--set", "a=b", RAY_PORT="6379", LWS_WORKER_INDEX="0")
    assert lines == [
        "ray start --head --port=6379 --include-dashboard=false --num-cpus=8",
        "worker ['--set', 'a=b'] ^tcp",
    ]


def test_another_pod_joins_the_leader_and_lingers_until_it_has_gone(pod: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as leader:
        port = str(leader.getsockname()[1])
        group = {"RAY_PORT": port, "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "127.0.0.1"}
        assert run(pod, "run", "fake_worker", **group) == [f"ray start --address=127.0.0.1:{port} --block --num-cpus=8"]
        command = ["sh", str(SCRIPT), "linger"]
        with subprocess.Popen(command, env={**pod, **group}) as lingering:
            leader.accept()[0].close()  # it has asked, and the leader was there
            assert lingering.poll() is None
            leader.close()
            assert lingering.wait(60) == 0
