"""What Linux says of threads that are ready and get no CPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from millrace_common.starvation import Starvation

PID = 7


class Kernel:
    """A process, as /proc shows it, and the clock."""

    def __init__(self, folder: Path) -> None:
        self.now, self.ran, self._folder = 100.0, 0.0, folder / str(PID) / "task"
        self._accounts = dict[int, tuple[float, float]]()

    def thread(self, tid: int, ran: float = 0.0, waited: float = 0.0, state: str = "S") -> None:
        """It went on for so many seconds."""
        before = self._accounts.get(tid, (0.0, 0.0))
        self.ran += ran
        self._accounts[tid] = ran, waited = before[0] + ran, before[1] + waited
        (self._folder / str(tid)).mkdir(parents=True, exist_ok=True)
        (self._folder / str(tid) / "schedstat").write_text(f"{round(ran * 1e9)} {round(waited * 1e9)} 3\n")
        (self._folder / str(tid) / "stat").write_text(f"{tid} (a) name) {state} 1 2 3\n")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def starvation(kernel: Kernel, folder: Path) -> Starvation:
    return Starvation(PID, (), folder, lambda: kernel.now, lambda: kernel.ran)


@pytest.mark.parametrize(
    ("ran", "waited", "state", "starved"),
    [
        (0.1, 0.3, "S", 0.75),  # what was waited is over
        (0.0, 0.0, "R", 1.0),  # it still waits
        (0.4, 0.0, "R", 0.0),  # it spins
        (0.0, 0.0, "S", 0.0),
        (0.0, 0.0, "T", 0.0),  # stopped
        (0.0, 0.0, "D", 0.0),
        (0.1, 9.0, "R", 1.0),  # most of it was waited before
    ],
)
def test_a_thread(kernel: Kernel, tmp_path: Path, ran: float, waited: float, state: str, starved: float) -> None:
    kernel.thread(7, 1.0, 1.0, state)
    seen = starvation(kernel, tmp_path)
    for _ in range(3):
        kernel.now += 0.4
        kernel.thread(7, ran, waited, state)
        assert seen.look() == pytest.approx(starved)


def test_the_thread_that_waited_longest_counts(kernel: Kernel, tmp_path: Path) -> None:
    for tid in (7, 8, 9):
        kernel.thread(tid)
    seen = starvation(kernel, tmp_path)
    kernel.now += 1.0
    kernel.thread(8, 0.5, 0.5)
    kernel.thread(9, 0.1, 0.7)
    kernel.thread(10, 0.1, 0.9)  # began meanwhile: nobody knows since when it waits
    some = Starvation(PID, (7, 8), tmp_path, lambda: kernel.now, lambda: kernel.ran)
    assert seen.look() == pytest.approx(0.7)
    kernel.now += 1.0
    kernel.thread(8, 0.5, 0.5)
    kernel.thread(9, 0.1, 0.7)
    assert some.look() == pytest.approx(0.5), "only these count"


def test_a_thread_that_has_become_ready_is_not_starved_yet(kernel: Kernel, tmp_path: Path) -> None:
    kernel.thread(7)
    seen = starvation(kernel, tmp_path)
    kernel.now += 1.0
    kernel.thread(7, state="R")
    assert seen.look() == 0.0
    kernel.now += 1.0
    assert seen.look() == 1.0
    kernel.now += 1.0
    kernel.thread(8, ran=0.1, state="R")
    assert seen.look() == 0.0, "the process has a CPU: what the other thread waits is accounted for later"


def test_a_process_that_has_ended_is_not_starved(kernel: Kernel, tmp_path: Path) -> None:
    seen = starvation(kernel, tmp_path)
    kernel.now += 1.0
    assert seen.look() == 0.0 and seen.look() == 0.0


def _spin() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    while True:
        pass


def looks(pid: int, until: Callable[[float], bool]) -> bool:
    """As often as a watcher does, until it is so."""
    seen = Starvation(pid)
    for _ in range(100):
        time.sleep(0.1)
        if until(seen.look()):
            return True
    return False


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel keeps no accounts of its scheduler")
def test_processes_that_share_a_cpu_are_starved_and_a_stopped_one_is_not() -> None:
    spinning = [multiprocessing.get_context("fork").Process(target=_spin, daemon=True) for _ in range(3)]
    try:
        for one in spinning:
            one.start()
        pid = spinning[0].pid
        assert pid is not None
        assert looks(pid, lambda starved: starved > 0.1)
        os.kill(pid, signal.SIGSTOP)
        assert looks(pid, lambda starved: starved == 0.0)
    finally:
        for one in spinning:
            one.kill()
