"""Pages in a folder that workers share: whole or absent, within a bound, and there after a restart."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from millrace_serve.transfer.base import PageBuffer, TransferError
from millrace_serve.transfer.disk_tier import MAX_STORES, DiskTier, Move
from millrace_serve.transfer.nixl_files import NixlFiles
from millrace_serve.transfer.page_folder import PageFolder
from millrace_testing.blocks import block

PAGE, PAGES = 4096, 8
BLOCK, OTHER = block(0xFEDCBA9876543210), block(1)
LAYOUT = "0" * 32


class Worker:
    """Host memory with random pages, and the folder as one worker sees it."""

    def __init__(self, path: Path, max_pages: int = 100, layout: str = LAYOUT) -> None:
        self.memory = np.random.default_rng(7).integers(0, 256, (PAGES, PAGE), dtype=np.uint8)
        pool = PageBuffer(self.memory.ctypes.data, PAGE, PAGES)
        self.folder = PageFolder(path, layout, pool, max_pages * PAGE)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    worker.folder.close()


def files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def test_a_page_comes_back_to_another_worker_after_a_restart(worker: Worker, tmp_path: Path) -> None:
    worker.folder.store(BLOCK, 3)
    other = Worker(tmp_path)
    assert other.folder.has(BLOCK) and other.folder.load(BLOCK, 5)
    assert (other.memory[5] == worker.memory[3]).all()
    assert not other.folder.has(OTHER) and not other.folder.load(OTHER, 5)
    other.folder.close()


def ended(tier: DiskTier, count: int) -> list[Move]:
    found: list[Move] = []
    while len(found) < count:
        found += tier.take()
    return found


def test_another_layout_shares_nothing(worker: Worker, tmp_path: Path) -> None:
    worker.folder.store(BLOCK, 3)
    other = Worker(tmp_path, layout="1" * 32)
    assert not other.folder.has(BLOCK) and not other.folder.load(BLOCK, 0)
    other.folder.close()


@pytest.mark.parametrize("harm", ["truncated", "torn", "a flipped bit", "another block's"])
def test_a_page_that_is_not_whole_is_never_read(worker: Worker, tmp_path: Path, harm: str) -> None:
    worker.folder.store(BLOCK, 3)
    [file] = files(tmp_path)
    good = file.read_bytes()
    if harm == "another block's":
        worker.folder.store(OTHER, 4)
        bad = next(other for other in files(tmp_path) if other != file).read_bytes()
    else:
        flipped = good[:100] + bytes([good[100] ^ 1]) + good[101:]
        bad = {"truncated": good[:-40], "torn": good[:2048] + bytes(len(good) - 2048), "a flipped bit": flipped}[harm]
    file.write_bytes(bad)
    assert not worker.folder.load(BLOCK, 5)
    assert not file.exists()
    worker.folder.store(BLOCK, 3)
    assert worker.folder.load(BLOCK, 5) and (worker.memory[5] == worker.memory[3]).all()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_page_that_cannot_be_read_now_is_read_later(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    worker.folder.store(BLOCK, 3)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(number))
        with pytest.raises(TransferError, match=os.strerror(number)):
            worker.folder.load(BLOCK, 5)
    assert worker.folder.load(BLOCK, 5) and (worker.memory[5] == worker.memory[3]).all()


def failing(number: int) -> Callable[..., Any]:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fails


def test_a_page_that_nixl_cannot_read_now_is_read_later(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.folder.store(BLOCK, 3)

    def fails(*_: Any) -> None:
        raise TransferError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(NixlFiles, "read", fails)
        with pytest.raises(TransferError, match="no memory"):
            worker.folder.load(BLOCK, 5)
    assert worker.folder.load(BLOCK, 5)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", failing(errno.ENOSPC))
        with pytest.raises(TransferError, match="No space left on device"):
            worker.folder.store(BLOCK, 3)
        tier = DiskTier(worker.folder)
        assert tier.store(BLOCK, 3)
        assert ended(tier, 1) == [Move(BLOCK, 3, is_load=False, ok=False)]
    assert not files(tmp_path) and not tier.has(BLOCK)
    assert tier.store(BLOCK, 3)
    assert ended(tier, 1) == [Move(BLOCK, 3, is_load=False, ok=True)], "there is room again"
    tier.close()


@pytest.mark.parametrize(("call", "number"), [("scandir", errno.EIO), ("unlink", errno.EROFS), ("stat", errno.EIO)])
def test_a_disk_that_fails_does_not_end_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Prompts would wait for ever for loads that nobody carries out."""
    worker = Worker(tmp_path, max_pages=1)
    tier, fails = DiskTier(worker.folder), failing(number)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        if call == "unlink":
            patched.setattr(os, "pwrite", fails)
            patched.setattr(Path, "unlink", fails)
        assert tier.store(BLOCK, 3)
        tier.load(OTHER, 5)
        while tier._thread.is_alive() and tier._done.qsize() < 2:
            pass
    assert len(tier.take()) == 2
    tier.close()


def test_a_page_of_another_user_is_read(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may read a file may not always set its time."""
    worker.folder.store(BLOCK, 3)

    def denied(*_: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "utime", denied)
    assert worker.folder.load(BLOCK, 5) and worker.folder.has(BLOCK)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TransferError, match=r"limits.disk_cache: .*file cannot be used: Not a directory"):
        Worker(tmp_path / "file")


def test_the_folder_stays_below_its_bound_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    worker = Worker(tmp_path, max_pages=20)
    for number in range(60):
        worker.folder.store(block(number), number % PAGES)
        for file in files(tmp_path):  # older by a second for each page that came after it
            os.utime(file, (1e9 + number, 1e9 + number)) if file.name == block(number).hex() else None
        if worker.folder.has(block(0)):
            assert worker.folder.load(block(0), 0)  # now is later than all of them
    assert sum(file.stat().st_size for file in files(tmp_path)) <= 22 * (PAGE + 64)
    assert worker.folder.has(block(0)) and worker.folder.has(block(59)) and not worker.folder.has(block(1))
    worker.folder.close()


def test_a_file_that_cannot_be_deleted_keeps_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user's in a folder with the sticky bit, say; it does not count as room either."""
    worker = Worker(tmp_path)
    for number in range(10):
        worker.folder.store(block(number), 0)
        [file] = tmp_path.rglob(block(number).hex())
        os.utime(file, (1e9 + number, 1e9 + number))
    unlink = os.unlink

    def denied(path: str) -> None:
        if path.endswith("0"):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path)

    monkeypatch.setattr(os, "unlink", denied)
    again = Worker(tmp_path, max_pages=6)
    assert [number for number in range(10) if again.folder.has(block(number))] == [0, 6, 7, 8, 9]
    assert "cannot delete 1 of its files" in caplog.text
    for each in (worker, again):
        each.folder.close()


def test_a_folder_that_cannot_be_counted_ends_no_thread(tmp_path: Path) -> None:
    """Somebody has put a file among its folders."""
    worker = Worker(tmp_path, max_pages=5)  # so few that every store counts
    (tmp_path / LAYOUT / "notes").touch()
    with pytest.raises(TransferError, match="notes"):
        worker.folder.store(BLOCK, 3)
    assert worker.folder.load(BLOCK, 4)
    worker.folder.close()


def test_an_error_that_nobody_foresaw_ends_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(tmp_path)
    tier = DiskTier(worker.folder)

    def unforeseen(*_: Any) -> bool:
        raise RuntimeError("unforeseen")

    with monkeypatch.context() as patched:
        patched.setattr(PageFolder, "load", unforeseen)
        tier.load(BLOCK, 5)
        while tier._thread.is_alive() and not tier._done.qsize():
            pass
    assert tier.take() == [Move(BLOCK, 5, is_load=True, ok=False)] and "unforeseen" in caplog.text
    tier.close()


def test_the_thread_stores_loads_and_ends(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    tier = DiskTier(worker.folder)

    assert tier.store(BLOCK, 3)
    assert ended(tier, 1) == [Move(BLOCK, 3, False, True)] and tier.has(BLOCK)
    tier.load(BLOCK, 5)
    tier.load(OTHER, 6)
    assert ended(tier, 2) == [Move(BLOCK, 5, True, True), Move(OTHER, 6, True, False)]
    assert (worker.memory[5] == worker.memory[3]).all()
    taken = sum(tier.store(block(number), 1) for number in range(100 * MAX_STORES))
    assert MAX_STORES <= taken < 100 * MAX_STORES, "a disk that is behind refuses"
    tier.close()
