"""Which part of the time a process was ready and got no CPU, by the accounts that Linux keeps of its threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

PROC = Path("/proc")


class Starvation:
    """Of a process on this host, since the latest `look`. The thread counts that waited longest for a CPU."""

    def __init__(
        self,
        pid: int,
        threads: Sequence[int] = (),
        proc: Path = PROC,
        clock: Callable[[], float] = time.monotonic,
        ran: Callable[[], float] | None = None,
    ) -> None:
        """
        Args:
            threads: that count; none: all, at 15 µs each.
            ran: seconds that the process was on a CPU; raises OSError when it has ended.
        """
        self._tasks, self._counted, self._clock = f"{proc}/{pid}/task", [*map(str, threads)], clock
        self._ran = ran or partial(time.clock_gettime, ~pid << 3 | 2)  # see clock_getcpuclockid(3)
        self._looked_at, self._process, self._threads = clock(), 0.0, dict[str, tuple[int, bool]]()
        self.look()

    def look(self) -> float:
        """From 0 to 1; 0 for a process that has ended, or where the kernel keeps no accounts."""
        before = self._looked_at, self._process, self._threads
        try:
            self._looked_at, self._process, self._threads = self._clock(), self._ran(), self._read()
        except (OSError, ValueError, IndexError):
            return 0.0
        passed, idle, starved = self._looked_at - before[0], self._process == before[1], 0.0
        if passed <= 0:
            return 0.0
        for thread, (waited, ready) in self._threads.items():
            if (known := before[2].get(thread)) is None:
                continue
            if idle and ready and known[1]:  # it still waits: that is accounted for when it is over
                return 1.0
            starved = max(starved, (waited - known[0]) / 1e9)
        return min(starved / passed, 1.0)

    def _read(self) -> dict[str, tuple[int, bool]]:
        """By thread: nanoseconds that it was ready without a CPU, and whether it is ready now, on a CPU or not."""
        found = {}
        for thread in self._counted or os.listdir(self._tasks):
            try:
                waited = int(_content(f"{self._tasks}/{thread}/schedstat").split()[1])
                state = _content(f"{self._tasks}/{thread}/stat").rpartition(b")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
            found[thread] = waited, state == b"R"
        return found


def _content(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)
