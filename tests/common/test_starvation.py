"""What Linux says of threads that lack a CPU, a disk or memory."""

import os
import threading
import time
from pathlib import Path

import pytest
from millrace_common.pace import READY, Starvation

PID = 7


class Kernel:
    """A process, as /proc shows it, and the clock."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder = 100.0, folder
        self._accounts = dict[int, tuple[float, float, int]]()

    def thread(self, tid: int, ran: float = 0.0, waited: float = 0.0, state: str = "S") -> None:
        """It went on for so many seconds."""
        before = self._accounts.get(tid, (0.0, 0.0, 0))
        self._accounts[tid] = before[0] + ran, before[1] + waited, before[2] + (ran + waited > 0 and state != "R!")
        ran, waited, slices = self._accounts[tid]
        folder = self.folder / str(PID) / "task" / str(tid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"{round(ran * 1e9)} {round(waited * 1e9)} {slices}\n")
        (folder / "stat").write_text(f"{tid} (a) name) {state[0]} 1 2 3\n")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def starvation(kernel: Kernel) -> Starvation:
    return Starvation(PID, kernel.folder, lambda: kernel.now)


@pytest.mark.parametrize(
    ("before", "ran", "waited", "state", "starved"),
    [
        ("S", 0.1, 0.3, "S", 0.75),  # what was waited is over
        ("R", 0.0, 0.0, "R", 1.0),  # it still waits
        ("S", 0.0, 0.0, "R", 0.0),  # it has become ready
        ("R", 0.4, 0.0, "R!", 0.0),  # it spins
        ("R", 0.1, 0.0, "R!", 0.75),  # so it does, and another virtual machine has its CPU
        ("R", 0.1, 0.0, "R", 0.0),  # it slept between
        ("S", 0.0, 0.0, "S", 0.0),
        ("T", 0.0, 0.0, "T", 0.0),  # stopped
        ("D", 0.0, 0.0, "D", 1.0),  # for a disk
        ("D", 0.1, 0.1, "D", 0.75),
        ("D", 0.0, 0.0, "S", 0.5),  # nobody knows for how long
        ("S", 0.0, 0.0, "D", 0.5),
        ("R", 0.1, 9.0, "R", 1.0),  # most of it was waited before
    ],
)
def test_a_thread(kernel: Kernel, before: str, ran: float, waited: float, state: str, starved: float) -> None:
    """`R!`: it left no CPU that it had."""
    kernel.thread(7, 1.0, 1.0, before)
    seen = starvation(kernel)
    kernel.now += 0.4
    kernel.thread(7, ran, waited, state)
    assert seen.look() == pytest.approx(starved)


def test_the_thread_that_lost_most_counts(kernel: Kernel) -> None:
    """The main thread of a rank sleeps until the one that launches its kernels is done."""
    for tid in (7, 8, 9):
        kernel.thread(tid)
    seen = starvation(kernel)
    kernel.now += 1.0
    kernel.thread(8, 0.5, 0.5)
    kernel.thread(9, 0.1, 0.7)
    kernel.thread(10, 0.1, 0.9)  # began meanwhile: nobody knows since when it waits
    assert seen.look() == pytest.approx(0.7)


def test_a_process_that_has_ended_is_not_starved(kernel: Kernel) -> None:
    seen = starvation(kernel)
    kernel.now += 1.0
    assert seen.look() == 0.0 and seen.look() == 0.0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel keeps no accounts of its scheduler")
def test_accounts_of_this_process_are_read_as_this_kernel_writes_them() -> None:
    account = Starvation(os.getpid())._threads[str(threading.get_native_id())]
    assert 0 < account.ran / 1e9 <= time.thread_time() and account.slices > 0 and account.state == READY
