"""How long somebody who makes progress may be silent before that is a hang, and which time is not counted.

    limit = max(LEAST_S, TIMES x the slowest recent gap between two signs of progress)

There is none before FEW gaps were seen. A PatientClock leaves out the pauses of its owner, and Starvation finds the
time that a process lost: Linux accounts what its threads lack, a CPU, a disk or memory. A thread that waits for another
one, for a device or in a collective sleeps, and has lost nothing by that.
"""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

LEAST_S = 2.0
TIMES = 20.0
FEW = 8
RECENT = 512  # a gap is remembered for as many gaps at least, and for twice as many at most
TICK_S = 0.1  # between two ticks of a PatientClock
READY, BLOCKED = b"R", b"D"  # states of a thread: on a CPU or waiting for one; waiting for a disk or for memory


class Slowest:
    """The largest of the recent values; infinite before there are FEW."""

    def __init__(self) -> None:
        self._now = self._before = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        self._now = max(self._now, value)
        self._count += 1
        if self._count == RECENT:
            self._before, self._now, self._count = self._now, 0.0, 0

    @property
    def value(self) -> float:
        return max(self._now, self._before) if self._before or self._count >= FEW else math.inf

    @property
    def limit_s(self) -> float:
        """Of silence, where the values are gaps in seconds."""
        return max(LEAST_S, TIMES * self.value)


class PatientClock:
    """Seconds that its owner has lived through. The owner ticks every TICK_S; however long a pause between two ticks
    was, it counts for two at most. So an owner that was stopped or starved takes no silence for that of others.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tick = clock(), clock()  # lived through, and when; one value: another thread may read it

    def now(self) -> float:
        lived, ticked = self._tick
        return lived + min(self._clock() - ticked, 2 * TICK_S)

    def tick(self) -> float:
        """Returns `now`."""
        self._tick = self.now(), self._clock()
        return self._tick[0]


class ThreadAccount(NamedTuple):
    """Since the thread began."""

    ran: int  # nanoseconds
    waited: int  # nanoseconds that it was ready without a CPU; a wait counts when it is over
    slices: int  # how often it came onto a CPU
    state: bytes  # now

    def lost_s(self, before: "ThreadAccount", passed: float) -> float:
        """Seconds of those that `passed` since `before`."""
        ran, waited = (self.ran - before.ran) / 1e9, (self.waited - before.waited) / 1e9
        if self.slices == before.slices and self.state == before.state == READY:
            return passed - ran  # it still waits, or another virtual machine has the CPU that it is on
        blocked = ((self.state == BLOCKED) + (before.state == BLOCKED)) / 2  # of the time in which it slept
        return waited + blocked * max(passed - ran - waited, 0.0)


class Starvation:
    """Of a process on this host, since the latest `look`. The thread counts that lost most: others may wait for it."""

    def __init__(self, pid: int, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._tasks, self._clock = f"{proc}/{pid}/task", clock
        self._looked_at, self._threads = clock(), dict[str, ThreadAccount]()
        self.look()

    def look(self) -> float:
        """From 0 to 1; 0 for a process that has ended, or where the kernel keeps no accounts. Takes 15 µs a thread."""
        looked_at, threads = self._looked_at, self._threads
        try:
            self._looked_at, self._threads = self._clock(), self._read()
        except (OSError, ValueError, IndexError):
            return 0.0
        if (passed := self._looked_at - looked_at) <= 0:
            return 0.0
        both = [(now, threads[thread]) for thread, now in self._threads.items() if thread in threads]
        return min(max((now.lost_s(before, passed) / passed for now, before in both), default=0.0), 1.0)

    def _read(self) -> dict[str, ThreadAccount]:
        found = {}
        for thread in os.listdir(self._tasks):
            try:
                ran, waited, slices = map(int, _content(f"{self._tasks}/{thread}/schedstat").split())
                state = _content(f"{self._tasks}/{thread}/stat").rpartition(b")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
            found[thread] = ThreadAccount(ran, waited, slices, state)
        return found


def _content(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()
