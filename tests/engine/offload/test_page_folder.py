"""Pages in a folder that workers share: whole, ours or absent, within a bound, and there after a restart."""

import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from millrace_serve.engine.offload import disk_tier
from millrace_serve.engine.offload.disk_tier import MAX_STORES, DiskTier, Move
from millrace_serve.engine.offload.page_folder import LEAST_PART, PageFolder
from millrace_serve.transfer.base import PageBuffer, TransferError
from millrace_testing import HANG_S
from millrace_testing.blocks import block

PAGE, PAGES = 4096, 8
BLOCK, OTHER = block(0xFEDCBA9876543210), block(1)
LAYOUT, LAYOUT_2 = "0" * 32, "1" * 32
SECRET = b"a secret of a deployment"


def opened(folder: PageFolder) -> DiskTier:
    tier = DiskTier(lambda: folder)
    tier.opened.result()
    return tier


class Worker:
    """Host memory with random pages, and the folder as one worker sees it."""

    def __init__(
        self, path: Path, max_pages: int = 100, layout: str = LAYOUT, secret: bytes = SECRET, page_bytes: int = PAGE
    ) -> None:
        self.memory = np.random.default_rng(7).integers(0, 256, (PAGES, page_bytes), dtype=np.uint8)
        pool = PageBuffer(self.memory.ctypes.data, page_bytes, PAGES)
        self.folder = PageFolder(path, layout, pool, max_pages * page_bytes, secret)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    worker.folder.close()


def files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_page_comes_back_to_workers_of_its_layout_after_a_restart(tmp_path: Path, secret: bytes) -> None:
    worker, other, third = (Worker(tmp_path, layout=of, secret=secret) for of in (LAYOUT, LAYOUT, LAYOUT_2))
    worker.folder.store(BLOCK, 3)
    assert other.folder.has(BLOCK) and other.folder.load(BLOCK, 5)
    assert (other.memory[5] == worker.memory[3]).all()
    for one, absent in ((other, OTHER), (third, BLOCK)):
        assert not one.folder.has(absent) and not one.folder.load(absent, 5)
    for one in (worker, other, third):
        one.folder.close()


def ended(tier: DiskTier, count: int) -> list[Move]:
    """As `take`, which does not wait."""
    return [tier._done.get(timeout=HANG_S) for _ in range(count)]


@pytest.mark.parametrize("page_bytes", [PAGE, 3 * LEAST_PART + 5])
def test_flipped_bit_anywhere_is_found(tmp_path: Path, page_bytes: int) -> None:
    """In the page and in its code, at the ends of each chunk that is hashed."""
    worker = Worker(tmp_path, page_bytes=page_bytes)
    worker.folder.store(BLOCK, 3)
    [file] = files(tmp_path)
    good, ends = file.read_bytes(), range(0, page_bytes, LEAST_PART)
    places = {*ends, *(end - 1 for end in ends[1:]), page_bytes - 1, *range(page_bytes, len(good))}
    for count, place in enumerate(sorted(places), 1):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        assert not worker.folder.load(BLOCK, 5) and not file.exists() and worker.folder.refused == count
    file.write_bytes(good)
    assert worker.folder.load(BLOCK, 5) and (worker.memory[5] == worker.memory[3]).all()
    worker.folder.close()


@pytest.mark.parametrize("harm", ["truncated", "torn", "longer", "empty", "block", "layout", "secret", "no secret"])
def test_file_that_is_no_page_of_ours_is_never_used(worker: Worker, tmp_path: Path, harm: str) -> None:
    """Whoever can write to the folder can put there what another block, model, layout or deployment has."""
    worker.folder.store(BLOCK, 3)
    [file] = files(tmp_path)
    good = file.read_bytes()
    others: dict[str, dict[str, Any]] = {
        "block": {},
        "layout": {"layout": LAYOUT_2},
        "secret": {"secret": b"another deployment's one"},
        "no secret": {"secret": b""},
    }
    if harm in others:
        other = Worker(tmp_path / "other", **others[harm])
        other.folder.store(OTHER if harm == "block" else BLOCK, 3)
        [bad] = [other.read_bytes() for other in files(tmp_path / "other")]
        other.folder.close()
    else:
        torn = good[:2048] + bytes(len(good) - 2048)
        bad = {"truncated": good[:-40], "torn": torn, "longer": good + b"x", "empty": b""}[harm]
    file.write_bytes(bad)
    assert not worker.folder.load(BLOCK, 5)
    assert not file.exists() and worker.folder.refused == 1
    worker.folder.store(BLOCK, 3)
    assert worker.folder.load(BLOCK, 5) and (worker.memory[5] == worker.memory[3]).all()


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "folder", "pipe", "socket", "dangling link", "owner"])
def test_what_is_no_file_of_ours_is_never_used(
    worker: Worker, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it leads to the right bytes. What it leads to is neither read, written nor deleted."""
    worker.folder.store(BLOCK, 3)
    [file] = files(tmp_path)
    target, good = tmp_path / "target", file.read_bytes()
    target.write_bytes(good)
    file.unlink()
    match kind:
        case "symbolic link":
            file.symlink_to(target)
        case "dangling link":
            file.symlink_to(tmp_path / "nowhere")
        case "hard link":
            file.hardlink_to(target)
        case "folder":
            file.mkdir()
            (file / "inside").write_bytes(good)
        case "pipe":
            os.mkfifo(file)
        case "socket":
            os.mknod(file, stat.S_IFSOCK | 0o600)
        case "owner":
            file.write_bytes(good)
            user = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert worker.folder.has(BLOCK) and not worker.folder.load(BLOCK, 5)
    assert worker.folder.refused == 1 and not worker.folder.has(BLOCK)
    monkeypatch.undo()
    worker.folder.store(BLOCK, 3)
    assert worker.folder.load(BLOCK, 5) and target.read_bytes() == good and not (tmp_path / "nowhere").exists()


def test_store_replaces_a_link_and_writes_to_nothing_that_it_leads_to(worker: Worker, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / LAYOUT / BLOCK.hex()).symlink_to(target)
    worker.folder.store(BLOCK, 3)
    assert worker.folder.load(BLOCK, 5) and target.read_bytes() == b"precious"


def test_nobody_else_can_read_or_write_the_folder_or_a_page(tmp_path: Path) -> None:
    """Whatever the umask, and even if others could before."""
    before = os.umask(0)
    try:
        (tmp_path / "kv" / LAYOUT_2).mkdir(parents=True)
        for layout in (LAYOUT, LAYOUT_2):
            worker = Worker(tmp_path / "kv", layout=layout)
            worker.folder.store(BLOCK, 3)
            worker.folder.close()
    finally:
        os.umask(before)
    for layout in (LAYOUT, LAYOUT_2):
        assert stat.S_IMODE((tmp_path / "kv" / layout).stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in files(tmp_path)} == {0o600}


@pytest.mark.parametrize("why", ["owner", "mode", "link"])
def test_folder_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    (tmp_path / LAYOUT).mkdir()
    if why == "owner":
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    elif why == "mode":
        (tmp_path / LAYOUT).chmod(0o777)
        monkeypatch.setattr(os, "fchmod", lambda fd, mode: None)  # of a file system without modes
    else:
        (tmp_path / LAYOUT).rmdir()
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / LAYOUT).symlink_to(tmp_path / "elsewhere")
    said = {"owner": "belongs to user", "mode": "others may write to 0000", "link": "Not a directory"}[why]
    with pytest.raises(TransferError, match=f"limits.disk_cache: {tmp_path} cannot be used: .*{said}"):
        Worker(tmp_path)


def test_folder_that_is_exchanged_while_we_use_it_changes_nothing(worker: Worker, tmp_path: Path) -> None:
    worker.folder.store(BLOCK, 3)
    (tmp_path / LAYOUT).rename(tmp_path / "moved")
    (tmp_path / LAYOUT).mkdir()
    (tmp_path / LAYOUT / BLOCK.hex()).write_bytes(b"theirs")
    worker.folder.store(OTHER, 4)
    assert worker.folder.load(BLOCK, 5) and worker.folder.load(OTHER, 6)
    assert (worker.memory[5:7] == worker.memory[3:5]).all()
    assert [file.name for file in files(tmp_path / LAYOUT)] == [BLOCK.hex()]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_page_that_cannot_be_read_now_is_read_later(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    worker.folder.store(BLOCK, 3)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(number))
        with pytest.raises(TransferError, match=os.strerror(number)):
            worker.folder.load(BLOCK, 5)
    assert worker.folder.load(BLOCK, 5) and (worker.memory[5] == worker.memory[3]).all()


def failing(number: int) -> Mock:
    return Mock(side_effect=OSError(number, os.strerror(number)))


@pytest.mark.parametrize("written", [None, PAGE])
def test_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int | None) -> None:
    """`written`: bytes for which there is room; None: for none."""
    worker = Worker(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", failing(errno.ENOSPC) if written is None else lambda *_: written)
        with pytest.raises(TransferError, match="No space left on device"):
            worker.folder.store(BLOCK, 3)
        tier = opened(worker.folder)
        assert tier.store(BLOCK, 3)
        assert ended(tier, 1) == [Move(BLOCK, 3, is_load=False, ok=False)]
    assert not files(tmp_path) and not tier.count([BLOCK])
    assert tier.store(BLOCK, 3)
    assert ended(tier, 1) == [Move(BLOCK, 3, is_load=False, ok=True)], "there is room again"
    tier.close()


@pytest.mark.parametrize("call", ["scandir", "unlink", "stat", "pwritev"])
def test_disk_that_fails_does_not_end_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """Prompts would wait for ever for loads that nobody carries out."""
    worker = Worker(tmp_path, max_pages=1)
    error = RuntimeError("unforeseen") if call == "pwritev" else OSError(errno.EIO, "")
    tier, fails = opened(worker.folder), Mock(side_effect=error)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        if call == "unlink":
            patched.setattr(os, "pwritev", fails)
        assert tier.store(BLOCK, 3)
        tier.load(OTHER, 5)
        while tier._thread.is_alive() and tier._done.qsize() < 2:
            pass
    assert len(tier.take()) == 2 and ("RuntimeError: unforeseen" in caplog.text) is (call == "pwritev")
    tier.close()


def test_page_whose_time_cannot_be_set_is_read(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is read-only now."""
    worker.folder.store(BLOCK, 3)
    monkeypatch.setattr(os, "utime", failing(errno.EROFS))
    assert worker.folder.load(BLOCK, 5) and worker.folder.has(BLOCK)


def test_folder_stays_below_its_bound_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    worker = Worker(tmp_path, max_pages=20)
    for number in range(60):
        worker.folder.store(block(number), number % PAGES)
        for file in files(tmp_path):  # older by a second for each page that came after it
            os.utime(file, (1e9 + number, 1e9 + number)) if file.name == block(number).hex() else None
        if worker.folder.has(block(0)):
            assert worker.folder.load(block(0), 0)  # now is later than all of them
    assert sum(file.stat().st_size for file in files(tmp_path)) <= 22 * (PAGE + 64)
    assert worker.folder.has(block(0)) and worker.folder.has(block(59)) and not worker.folder.has(block(1))
    smaller = Worker(tmp_path, max_pages=10)
    assert len(files(tmp_path)) == 8, "a tenth more than needed goes, or every further page would count the folder"
    for each in (worker, smaller):
        each.folder.close()


def test_file_that_cannot_be_deleted_keeps_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user's in a folder with the sticky bit, say; it does not count as room either."""
    worker = Worker(tmp_path)
    for number in range(10):
        worker.folder.store(block(number), 0)
        [file] = tmp_path.rglob(block(number).hex())
        os.utime(file, (1e9 + number, 1e9 + number))
    unlink = os.unlink

    def denied(path: str, dir_fd: int) -> None:
        if path.endswith("0"):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", denied)
    again = Worker(tmp_path, max_pages=6)
    assert [number for number in range(10) if again.folder.has(block(number))] == [0, 6, 7, 8, 9]
    assert "cannot delete 1 of its files" in caplog.text
    for each in (worker, again):
        each.folder.close()


def test_bound_is_one_for_all_layouts_and_formats(tmp_path: Path) -> None:
    """What no worker has a use for any more goes first, because nobody reads it. What is not ours stays."""
    old, notes, link = tmp_path / LAYOUT_2 / "ab" / ("ab" * 32), tmp_path / "notes", tmp_path / ("2" * 32)
    old.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for file in (old, notes, tmp_path / "elsewhere" / "page", tmp_path / ("3" * 32)):
        file.write_bytes(bytes(20 * PAGE))
        os.utime(file, (1e9, 1e9))
    link.symlink_to(tmp_path / "elsewhere")
    worker = Worker(tmp_path, max_pages=20)
    assert old.exists()
    for number in range(3):
        worker.folder.store(block(number), 0)
    assert not old.exists() and all(worker.folder.has(block(number)) for number in range(3))
    assert notes.exists() and (link / "page").exists() and (tmp_path / ("3" * 32)).exists()
    worker.folder.close()


class Slow:
    """A folder whose first store waits for the test; nothing can be loaded from it."""

    refused = 0

    def __init__(self) -> None:
        self.began, self.goes_on, self.calls = threading.Event(), threading.Event(), list[str]()

    def has(self, block: bytes) -> bool:
        return False

    def store(self, block: bytes, slot: int) -> None:
        self.calls.append(f"store {slot}")
        self.began.set()
        assert self.goes_on.wait(HANG_S)

    def load(self, block: bytes, slot: int) -> bool:
        self.calls.append(f"load {slot}")
        raise TransferError("the disk is broken")

    def close(self) -> None:
        pass


def test_loads_go_before_stores_and_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt waits for a load, and nobody for a store."""
    folder = Slow()
    tier = opened(folder)  # type: ignore[arg-type]
    assert tier.store(BLOCK, 0) and folder.began.wait(HANG_S)
    assert tier.store(OTHER, 1)
    for slot in (2, 3):
        tier.load(BLOCK, slot)
    folder.goes_on.set()
    assert [(move.slot, move.ok) for move in ended(tier, 4)] == [(0, True), (2, False), (3, False), (1, True)]
    assert folder.calls == ["store 0", "load 2", "load 3", "store 1"]
    assert [record.getMessage().count("the disk is broken") for record in caplog.records] == [1]
    tier.close()


def test_disk_that_hangs_keeps_no_worker_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "CLOSE_S", 0.0)
    folder = Slow()
    tier = opened(folder)  # type: ignore[arg-type]
    assert tier.store(BLOCK, 0) and folder.began.wait(HANG_S)
    assert tier.close() is False
    folder.goes_on.set()


def test_thread_stores_loads_and_ends(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    tier = opened(worker.folder)

    assert tier.store(BLOCK, 3)
    assert ended(tier, 1) == [Move(BLOCK, 3, False, True)] and tier.count([BLOCK, OTHER]) == 1
    tier.load(BLOCK, 5)
    tier.load(OTHER, 6)
    assert ended(tier, 2) == [Move(BLOCK, 5, True, True), Move(OTHER, 6, True, False)]
    assert (worker.memory[5] == worker.memory[3]).all()
    [file] = files(tmp_path)
    file.write_bytes(file.read_bytes()[::-1])
    tier.load(BLOCK, 5)
    assert ended(tier, 1) == [Move(BLOCK, 5, True, False, refused=True)]
    taken = sum(tier.store(block(number), 1) for number in range(100 * MAX_STORES))
    assert MAX_STORES <= taken < 100 * MAX_STORES, "a disk that is behind refuses"
    tier.close()
