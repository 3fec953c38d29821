"""One child process of a local cluster: start, announced ports, log file, stop.

Life: `start` → runs, announces its bound ports in a file → exits by itself, or `stop` (SIGTERM, bounded wait,
SIGKILL) → may `start` again. Every child leads its own process group, so that Ctrl-C in a terminal reaches the
supervisor alone, and dies with the supervisor.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

EXEC_GUARD = Path(__file__).with_name("exec_guard.py")


class Process:
    """A named command that understands `--announce FILE`. Its output goes to `<name>.log` in the log folder."""

    def __init__(self, name: str, folder: Path, env: dict[str, str]) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        self.started_at: float | None = None  # time.monotonic() of the last start
        self.starts = 0
        self.state = "starting"  # then a worker's state in lower case, "ready" and "exited"
        self.detail = ""
        self._settled_at: float | None = None
        self._announce_path = folder / f"{name}.ports.json"
        self._env = env
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, command: Sequence[str]) -> None:
        assert not self.running, f"{self.name} is running"
        self._announce_path.unlink(missing_ok=True)
        guarded = [sys.executable, "-S", str(EXEC_GUARD), str(os.getpid()), *command]
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *guarded,
                "--announce",
                str(self._announce_path),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
        self.started_at, self._settled_at = time.monotonic(), None
        self.state, self.detail = "starting", ""
        self.starts += 1

    def note(self, state: str, detail: str = "") -> None:
        """What is seen of the process from outside. A ready one stays so until it exits."""
        if self.state != "exited" and (self.state != "ready" or state == "exited"):
            self.state, self.detail = state, detail
            self._settled_at = time.monotonic() if state in ("ready", "exited") else None

    @property
    def seconds(self) -> float:
        """Since the start; stands still once the process is ready or has exited."""
        return 0.0 if self.started_at is None else (self._settled_at or time.monotonic()) - self.started_at

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def _child(self) -> asyncio.subprocess.Process:
        assert self._process is not None, f"{self.name} was never started"
        return self._process

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode if self._process else None

    def announced(self) -> dict[str, int] | None:
        """Bound ports by name ("grpc", "http", "admin", "metrics"), or None when not bound yet."""
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            ports: dict[str, int] = json.loads(self._announce_path.read_text())
            return ports
        return None

    def log_tail(self, lines: int = 30) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def end_of_log(self, lines: int) -> str:
        return f"The end of {self.log_path}:\n{self.log_tail(lines)}"

    def send(self, number: signal.Signals) -> None:
        if self.running:
            self._child.send_signal(number)

    async def wait(self) -> int:
        code = await self._child.wait()
        self.note("exited", f"code {code}")
        return code

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL to its whole group when it has not gone after `grace_s`."""
        if not self.running:
            return
        self.send(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.kill_group()
            await self.wait()

    def kill_group(self) -> None:
        """SIGKILL to the process and its own children, while it is still there to name the group."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):  # it ended; the event loop has not heard of it yet
                os.killpg(self.pid, signal.SIGKILL)
