"""A folder of KV pages, one file each, which workers of equal KV layout share and which survives restarts.

    <folder>/<layout fingerprint>/<first two digits of the block>/<block, 64 digits>

A file has the page's bytes and a trailer with the block and a checksum. It is written under another name and renamed,
so a page is there whole or not at all; what a power cut tore fails its checksum, and the file is deleted.

Every rank counts the folder when it has written a tenth of the bound, and deletes what was used longest ago. So between
two counts the ranks that share a folder may exceed the bound by a tenth each.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from ctypes import c_ubyte
from pathlib import Path

from millrace_common.page_hash import BLOCK_BYTES

from millrace_serve.transfer.base import PageBuffer, TransferError
from millrace_serve.transfer.nixl_files import NixlFiles

log = logging.getLogger(__name__)

TRAILER = struct.Struct(f"<8s{BLOCK_BYTES}sI")
MAGIC = b"millrace"
RECOUNT = 0.1  # of the bound: so much is written between two counts of the folder


class PageFolder:
    """`pool` is the host memory that pages are written from and read into. One thread at a time."""

    def __init__(self, folder: Path, fingerprint: str, pool: PageBuffer, max_bytes: int) -> None:
        """Raises TransferError when the folder cannot be written or NIXL cannot be used."""
        self._folder = folder.expanduser() / fingerprint
        self._pool = pool
        self._max_bytes = max_bytes
        self._uncounted = 0  # bytes written since the folder was counted
        self._files = NixlFiles(pool)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._trim()
        except OSError as error:
            raise TransferError(f"limits.disk_cache: {folder} cannot be used: {error.strerror}") from error

    def has(self, block: bytes) -> bool:
        """May be called by any thread."""
        return os.path.exists(self._path(block))  # which raises nothing; Path.exists raises what is no "not found"

    def store(self, block: bytes, page: int) -> None:
        """Write page `page` of the pool as `block`. Raises TransferError and leaves no torn file behind."""
        path = self._path(block)
        new = path.with_name(f".{path.name}.{os.getpid()}-{id(self):x}")
        try:
            path.parent.mkdir(exist_ok=True)
            with _opened(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as fd:
                self._files.write(page, fd)
                os.pwrite(fd, self._trailer(block, page), self._pool.page_bytes)
            new.rename(path)
            self._uncounted += self._pool.page_bytes
            if self._uncounted >= RECOUNT * self._max_bytes:
                self._trim()
        except (OSError, TransferError) as error:
            with contextlib.suppress(OSError):  # a disk that is read-only now refuses this too
                new.unlink()
            raise TransferError(f"{path} cannot be written: {error}") from error

    def load(self, block: bytes, page: int) -> bool:
        """Read `block` into page `page` of the pool. False: it is not there whole, and the page holds anything. Raises
        TransferError when it cannot be read, perhaps only now: then it stays.
        """
        path = self._path(block)
        try:
            with _opened(path, os.O_RDONLY) as fd:
                whole = os.fstat(fd).st_size == self._pool.page_bytes + TRAILER.size
                if whole:
                    self._files.read(page, fd)
                    whole = os.pread(fd, TRAILER.size, self._pool.page_bytes) == self._trailer(block, page)
        except FileNotFoundError:
            return False
        except (OSError, TransferError) as error:
            raise TransferError(f"{path} cannot be read: {error}") from error
        if whole:
            with contextlib.suppress(OSError):  # another user's, or deleted meanwhile: what was read is whole
                os.utime(path)
        else:
            log.warning("deleted %s, which is no whole page", path)
            self.remove(block)
        return whole

    def remove(self, block: bytes) -> None:
        """May be called by any thread."""
        with contextlib.suppress(OSError):
            self._path(block).unlink()

    def close(self) -> None:
        self._files.close()

    def _path(self, block: bytes) -> Path:
        name = block.hex()
        return self._folder / name[:2] / name

    def _trailer(self, block: bytes, page: int) -> bytes:
        size = self._pool.page_bytes
        return TRAILER.pack(MAGIC, block, zlib.crc32((c_ubyte * size).from_address(self._pool.address + page * size)))

    def _trim(self) -> None:
        """Count the folder. Above the bound, delete what was used longest ago, a tenth more than needed. What cannot be
        deleted stays, and others go in its place.
        """
        self._uncounted = 0
        found = []
        for entry in (file for sub in os.scandir(self._folder) for file in os.scandir(sub)):
            with contextlib.suppress(FileNotFoundError):  # another worker deleted it
                facts = entry.stat()
                found.append((facts.st_mtime, facts.st_size, entry.path))
        excess = sum(size for _, size, _ in found) - self._max_bytes
        if excess <= 0:
            return
        excess += int(RECOUNT * self._max_bytes)
        stuck = []
        for _, size, path in sorted(found):
            if excess <= 0:
                break
            try:
                os.unlink(path)
            except FileNotFoundError:  # another worker deleted it
                pass
            except OSError as error:
                stuck.append(error)
                continue
            excess -= size
        if stuck:
            log.warning("%s: cannot delete %d of its files, the last one: %s", self._folder, len(stuck), stuck[-1])


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)
