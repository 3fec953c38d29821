"""A folder of KV pages, one file each, which workers of one user and one KV layout share and which survives restarts.

    <folder>/<layout fingerprint>/<block, 64 digits>

The folder of a layout belongs to this user, and nobody else may enter it. It is opened once, and everything in it is
reached by that descriptor: what happens to names above it changes nothing. A file has the page's bytes and a code,
which nobody can make who does not know the deployment's secret. It is written under another name and renamed, so a page
is there whole or not at all. What a power cut tore or somebody else wrote fails its code, and is deleted.

    key  = derive(secret, "page code", fingerprint of the KV layout, which names the weights)
    code = blake2b-256(block + SHA-256 of each part of the page), keyed

Every leader counts the folders of all layouts when it has written a tenth of the bound, and deletes what was used
longest ago. So between two counts the leaders that share a folder may exceed the bound by a tenth each.
"""

import contextlib
import errno
import hashlib
import hmac
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_ubyte
from pathlib import Path

from millrace_common import deployment_secret

from millrace_serve.transfer.base import PageBuffer, TransferError

log = logging.getLogger(__name__)

RECOUNT = 0.1  # of the bound: so much is written between two counts of the folder
LAYOUT = re.compile("[0-9a-f]{32}")  # name of a layout's folder
FOLDER = os.O_RDONLY | os.O_DIRECTORY
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL
PAGE = os.O_RDONLY | os.O_NONBLOCK  # a pipe opens at once
NO_PAGE = (errno.ELOOP, errno.ENXIO)  # opening a symbolic link, a socket
CODE_BYTES = 32
THREADS = 4  # SHA-256 takes 1.3 GB/s on a core
LEAST_PART = 1 << 18  # bytes for which another thread is worth it


class PageCode:
    """Hashes parts on several threads without the interpreter's lock: a disk of several GB/s stays the slower one."""

    def __init__(self, secret: bytes, fingerprint: str) -> None:
        """secret: empty: everybody can make codes, which then only show damage."""
        self._key = deployment_secret.derive(secret, "page code", fingerprint)
        self._threads = ThreadPoolExecutor(THREADS, "page-code")

    def of(self, block: bytes, page: memoryview) -> bytes:
        size = max(-(-len(page) // THREADS), LEAST_PART)
        parts = [page[start : start + size] for start in range(0, len(page), size)]
        digests = self._threads.map(_digest, parts) if len(parts) > 1 else map(_digest, parts)
        return hashlib.blake2b(block + b"".join(digests), key=self._key, digest_size=CODE_BYTES).digest()

    def close(self) -> None:
        self._threads.shutdown()


class PageFolder:
    """`pool` is the host memory that pages are written from and read into. One thread at a time."""

    def __init__(self, folder: Path, fingerprint: str, pool: PageBuffer, max_bytes: int, secret: bytes = b"") -> None:
        """Raises TransferError when the folder cannot be used safely."""
        self.refused = 0  # files that were no page of ours
        self._pool = pool
        self._max_bytes = max_bytes
        self._uncounted = 0  # bytes written since the folder was counted
        self._name, self._fingerprint = f"{folder}/{fingerprint}", fingerprint
        self._code = PageCode(secret, fingerprint)
        self._open = contextlib.ExitStack()
        try:
            folder = folder.expanduser()
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700, parents=True)
            self._root = self._open.enter_context(_opened(folder, FOLDER))
            with contextlib.suppress(FileExistsError):
                os.mkdir(fingerprint, 0o700, dir_fd=self._root)
            self._at = self._open.enter_context(_own_folder(fingerprint, self._root))
            self._trim()
        except OSError as error:
            self._open.close()
            raise TransferError(f"limits.disk_cache: {folder} cannot be used: {error.strerror}") from error

    def has(self, block: bytes) -> bool:
        """May be called by any thread."""
        try:
            os.stat(block.hex(), dir_fd=self._here(), follow_symlinks=False)
        except OSError:
            return False
        return True

    def store(self, block: bytes, page: int) -> None:
        """Write page `page` of the pool as `block`. Raises TransferError and leaves no torn file behind."""
        name, new, size = block.hex(), f".{secrets.token_hex(16)}", self._pool.page_bytes
        content = self._bytes_of(page)
        try:
            with _opened(new, NEW, self._here()) as fd:
                if os.pwritev(fd, (content, self._code.of(block, content)), 0) < size + CODE_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.rename(new, name, src_dir_fd=self._at, dst_dir_fd=self._at)
            self._uncounted += size
            if self._uncounted >= RECOUNT * self._max_bytes:
                self._trim()
        except OSError as error:
            with contextlib.suppress(OSError):  # a disk that is read-only now refuses this too
                os.unlink(new, dir_fd=self._at)
            raise TransferError(f"{self._name}/{name} cannot be written: {error}") from error

    def load(self, block: bytes, page: int) -> bool:
        """Read `block` into page `page` of the pool. False: it is not there, or is not what was stored; the page holds
        anything. Raises TransferError when it cannot be read, perhaps only now: then it stays.
        """
        name, content, code = block.hex(), self._bytes_of(page), bytearray(CODE_BYTES)
        try:
            with _opened(name, PAGE, self._here()) as fd:
                good = self._is_ours(os.fstat(fd))
                if good:
                    os.set_blocking(fd, True)
                    os.preadv(fd, (content, code), 0)
                    good = hmac.compare_digest(code, self._code.of(block, content))
                if good:
                    with contextlib.suppress(OSError):  # a disk that is read-only now: what was read is whole
                        os.utime(fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in NO_PAGE:
                raise TransferError(f"{self._name}/{name} cannot be read: {error}") from error
            good = False
        if not good:
            self.refused += 1
            log.warning("deleted %s/%s: not a page of this deployment and layout", self._name, name)
            self.remove(block)
        return good

    def remove(self, block: bytes) -> None:
        """May be called by any thread."""
        with contextlib.suppress(OSError):
            try:
                os.unlink(block.hex(), dir_fd=self._at)
            except IsADirectoryError:
                shutil.rmtree(block.hex(), dir_fd=self._at)

    def close(self) -> None:
        self._code.close()
        self._open.close()

    def _here(self) -> int:
        """The folder of the layout, made again where somebody has deleted it. The one above it is not: it may be an
        empty mount point now. Raises OSError. For any thread.
        """
        if not os.fstat(self._at).st_nlink:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._fingerprint, 0o700, dir_fd=self._root)
            with _own_folder(self._fingerprint, self._root) as fd:
                os.dup2(fd, self._at, inheritable=False)  # for all threads at once
        return self._at

    def _is_ours(self, facts: os.stat_result) -> bool:
        """Whether a file may be a page: no other user owns it or has another name for it. A file without a name was
        replaced meanwhile.
        """
        whole = facts.st_size == self._pool.page_bytes + CODE_BYTES
        return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and facts.st_nlink <= 1 and whole

    def _bytes_of(self, page: int) -> memoryview:
        size = self._pool.page_bytes
        return memoryview((c_ubyte * size).from_address(self._pool.address + page * size))

    def _trim(self) -> None:
        """Count the folders of all layouts. Above the bound, delete what was used longest ago, a tenth more than
        needed. What cannot be deleted stays, and others go in its place.
        """
        self._uncounted = 0
        with contextlib.ExitStack() as layouts:
            found: list[tuple[float, int, str, int]] = []
            for entry in os.scandir(self._root):
                if LAYOUT.fullmatch(entry.name):
                    with contextlib.suppress(PermissionError, NotADirectoryError, FileNotFoundError):  # not ours
                        found += _files(layouts.enter_context(_own_folder(entry.name, self._root)))
            self._delete(found)

    def _delete(self, found: list[tuple[float, int, str, int]]) -> None:
        excess = sum(size for _, size, _, _ in found) - self._max_bytes
        if excess <= 0:
            return
        excess += int(RECOUNT * self._max_bytes)
        stuck = []
        for _, size, path, at in sorted(found):
            if excess <= 0:
                break
            try:
                os.unlink(path, dir_fd=at)
            except FileNotFoundError:  # another worker deleted it
                pass
            except OSError as error:
                stuck.append(error)
                continue
            excess -= size
        if stuck:
            log.warning("%s: cannot delete %d of its files, the last one: %s", self._name, len(stuck), stuck[-1])


def _files(folder: int) -> Iterator[tuple[float, int, str, int]]:
    """Time of the last use, bytes, path and `folder` of everything in there. Earlier versions had folders in it."""
    for path, _, names, at in os.fwalk(dir_fd=folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another worker deleted it
                facts = os.stat(name, dir_fd=at, follow_symlinks=False)
                yield facts.st_mtime, facts.st_size, f"{path}/{name}", folder


@contextlib.contextmanager
def _own_folder(name: str, at: int) -> Iterator[int]:
    """A folder that nobody else can enter, also if others could before. Raises OSError."""
    with _opened(name, FOLDER, at) as fd:
        facts = os.fstat(fd)
        if facts.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"{name} belongs to user {facts.st_uid}, not to {os.geteuid()}")
        if facts.st_mode & 0o077:
            os.fchmod(fd, 0o700)
        if os.fstat(fd).st_mode & 0o022:
            raise PermissionError(errno.EPERM, f"others may write to {name}, and that cannot be changed")
        yield fd


@contextlib.contextmanager
def _opened(path: Path | str, flags: int, at: int | None = None) -> Iterator[int]:
    """`at`: the folder that it is in; then it is no symbolic link. Raises OSError."""
    fd = os.open(path, flags if at is None else flags | os.O_NOFOLLOW, 0o600, dir_fd=at)
    try:
        yield fd
    finally:
        os.close(fd)


def _digest(part: memoryview) -> bytes:
    return hashlib.sha256(part).digest()
