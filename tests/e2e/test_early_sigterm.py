"""SIGTERM while a process is PID 1 and still imports: the kernel drops it there unless the process has a handler."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from millrace_testing.paths import ROOT

FILES = ROOT / "helm/millrace/files"
NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child=KILL")
MODULE = "import os\nprint('imported', flush=True)\nopen(os.environ['BLOCKED']).read()\n"


def _no_namespace() -> str:
    try:
        done = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        return "there is no command unshare"
    return done.stderr.strip()


pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(_no_namespace()), reason=f"no PID namespace: {_no_namespace()}")]


def exit_code(command: list[str], environment: dict[str, str], shown: str) -> int:
    """Run `command` as PID 1 of its own namespace, send it SIGTERM once its output has `shown`, and wait for it."""
    process = subprocess.Popen(
        [*NAMESPACE, *command],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert any(shown in line for line in process.stdout), f"{command} has ended early"
        first = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first[0]), signal.SIGTERM)
        return process.wait()  # for ever, where a signal was dropped
    finally:
        process.kill()  # takes the namespace with it
        process.wait()


@pytest.fixture
def importing(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Make the import of a package block for ever. Returns the environment for it."""

    def make(package: str) -> dict[str, str]:
        os.mkfifo(tmp_path / "blocked")
        (tmp_path / f"{package}.py").write_text(MODULE)
        path = [str(tmp_path), *(str(ROOT / name) for name in ("proto", "kernels", "services", "router"))]
        return {"PYTHONPATH": ":".join(path), "BLOCKED": str(tmp_path / "blocked")}

    return make


@pytest.mark.parametrize(
    ("module", "package", "code"),
    [
        ("millrace_router", "pydantic", 0),
        ("millrace_serve.prefill", "pydantic", 0),
        ("millrace_serve.decode", "pydantic", 0),
        ("millrace_cli", "typer", 143),
    ],
)
def test_process_that_imports_ends(
    module: str, package: str, code: int, importing: Callable[[str], dict[str, str]]
) -> None:
    assert exit_code([sys.executable, "-m", module], importing(package), "imported") == code


def test_init_container_that_waits_for_its_model_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-u", str(FILES / "preflight.py"), "--model", str(tmp_path / "nowhere")]
    assert exit_code(command, {}, "nowhere") == 143


def test_pod_that_waits_for_its_leader_ends(tmp_path: Path) -> None:
    group = {"MILLRACE_RUN": str(tmp_path), "RAY_PORT": "1", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "127.0.0.1"}
    command = ["/bin/sh", str(FILES / "start.sh"), "run", "millrace_serve.decode"]
    assert exit_code(command, group, "waiting for the leader's Ray") == 143
