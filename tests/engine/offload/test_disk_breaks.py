"""A disk tier whose folder fills, is emptied, torn or removed while pages are read and written: what is loaded is
right, the thread lives, and everything works again afterwards.
"""

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from millrace_serve.engine.offload.disk_tier import DiskTier, Move
from millrace_serve.engine.offload.page_folder import PageFolder
from millrace_serve.transfer.base import PageBuffer
from millrace_testing.blocks import block
from millrace_testing.shared_disk import SharedDisk

PAGE, SLOTS, BLOCKS = 4096, 8, 40
LAYOUT = "0" * 32


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, PAGE, dtype=np.uint8)


class Worker:
    """A disk tier over its own memory; a move at a time."""

    def __init__(self, folder: Path, max_pages: int = 12) -> None:
        self.memory = np.zeros((SLOTS, PAGE), dtype=np.uint8)
        pool = PageBuffer(self.memory.ctypes.data, PAGE, SLOTS)
        self.tier = DiskTier(lambda: PageFolder(folder, LAYOUT, pool, max_pages * PAGE))

    def store(self, number: int) -> bool:
        self.memory[0] = content(number)
        assert self.tier.store(block(number), 0)
        return self._end(Move(block(number), 0, is_load=False))

    def load(self, number: int) -> bool:
        """And whether it is right, if it came."""
        self.memory[1] = 0
        self.tier.load(block(number), 1)
        ok = self._end(Move(block(number), 1, is_load=True))
        assert not ok or (self.memory[1] == content(number)).all(), "a wrong page"
        return ok

    def _end(self, move: Move) -> bool:
        one = self.tier._done.get()  # `take` does not wait
        assert (one.block, one.slot, one.is_load) == (move.block, move.slot, move.is_load)
        return one.ok


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SharedDisk]:
    disk = SharedDisk(tmp_path / "disk", 1)
    yield disk
    disk.close()


@pytest.fixture
def workers(disk: SharedDisk) -> Iterator[list[Worker]]:
    made = [Worker(disk.folder), Worker(disk.folder)]
    yield made
    for worker in made:
        worker.tier.close()


def breaks(disk: SharedDisk) -> list[Callable[[], None]]:
    """What can happen to the folder at any time."""
    layout = disk.folder / LAYOUT

    def remove_all() -> None:
        shutil.rmtree(layout, ignore_errors=True)

    def remove_some() -> None:
        for sub in disk.pages()[:5]:
            shutil.rmtree(sub.parent, ignore_errors=True)

    found = [disk.lose, lambda: disk.tear(random.Random(1)), remove_all, remove_some]
    return [*found, disk.fill, disk.free] if disk.bounded else found


def test_whatever_happens_meanwhile_what_is_loaded_is_right(disk: SharedDisk, workers: list[Worker]) -> None:
    """Another thread breaks the folder all the time, and two workers evict each other's pages."""
    ended, errors = threading.Event(), list[BaseException]()

    def breaking() -> None:
        rng = random.Random(2)
        while not ended.is_set():
            try:
                rng.choice(breaks(disk))()
            except OSError:
                pass  # what it breaks has gone
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=breaking)
    thread.start()
    rng, loaded = random.Random(3), 0
    try:
        for _ in range(80):
            worker, number = rng.choice(workers), rng.randrange(BLOCKS)
            worker.store(number)
            loaded += rng.choice(workers).load(number)
    finally:
        ended.set()
        thread.join()
    assert not errors
    disk.free()
    works(workers)


def works(workers: list[Worker]) -> None:
    one, other = workers
    assert one.store(1000) and other.load(1000)


@pytest.mark.parametrize("index", range(6))
def test_it_works_again_after_each(disk: SharedDisk, workers: list[Worker], index: int) -> None:
    all_of_them = breaks(disk)
    if index >= len(all_of_them):
        pytest.skip("this machine mounts no file system for a test")
    for number in range(10):
        assert workers[0].store(number)
    all_of_them[index]()
    for number in range(10):
        workers[1].load(number)
        workers[0].store(number)
    disk.free()
    works(workers)


def test_file_that_is_evicted_while_it_is_read_is_read_whole(
    disk: SharedDisk, workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    fstat, fds = os.fstat, list[int]()

    def evicted(fd: int) -> os.stat_result:
        """Between the open and the read."""
        if os.readlink(f"/proc/self/fd/{fd}").endswith(block(7).hex()):
            fds.append(fd)
            disk.lose()
        return fstat(fd)

    assert workers[0].store(7)
    monkeypatch.setattr(os, "fstat", evicted)
    assert workers[1].load(7) and fds
    assert not workers[1].load(7)
