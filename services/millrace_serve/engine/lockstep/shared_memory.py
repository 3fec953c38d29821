"""Memory that the ranks of a host share, and waiting for each other in it without turning round.

counter  a number that one rank only ever raises; others sleep on it (futex) until it has reached theirs
wake-up pipe     a pipe of each rank: it wakes a rank that sleeps on its inbox, and its lock is free as soon as the
         rank's process has ended, however it ended

x86-64 Linux: its stores are seen in their order, so what a rank wrote before it raised a counter is there for those who
have seen the counter.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
from collections.abc import Callable
from pathlib import Path

FUTEX, FUTEX_WAIT, FUTEX_WAKE = 202, 0, 1  # the call's number on x86-64
EVERYBODY = 2**31 - 1
LOOK_S = 0.25  # how often a waiting rank looks whether the others live
WORD, MASK, HALF = 4, 2**32 - 1, 2**31

_futex = ctypes.CDLL(None).syscall
_futex.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


class RankLost(RuntimeError):
    """Another rank has ended; the message names it."""


class Segment:
    """`nbytes` zeroed bytes at `path`, which is a name in memory (/dev/shm). Raises OSError: there is no room."""

    def __init__(self, path: Path, nbytes: int, *, create: bool) -> None:
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            raise RuntimeError(f"several ranks need Linux on x86-64, not {platform.system()} on {platform.machine()}")
        fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                os.posix_fallocate(fd, 0, nbytes)  # otherwise a write without room would be a SIGBUS
            self._map = mmap.mmap(fd, nbytes)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)
        self.view = memoryview(self._map)
        self._words = self.view.cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def counter(self, offset: int) -> Counter:
        """Of the four bytes at `offset`, alone in their cache line."""
        return Counter(self._words, offset // WORD, self._address + offset)


class Counter:
    """Modulo 2^32: values that are compared lie less than 2^31 apart."""

    def __init__(self, words: memoryview, index: int, address: int) -> None:
        self._words, self._index, self._address = words, index, address

    def has(self, value: int) -> bool:
        """Whether it has reached `value`."""
        return (self._words[self._index] - value) & MASK < HALF

    def raise_to(self, value: int) -> None:
        self._words[self._index] = value & MASK
        self.wake()

    def wake(self) -> None:
        """All who wait look around."""
        _futex(FUTEX, self._address, FUTEX_WAKE, EVERYBODY, None)

    def wait(self, value: int, look: Callable[[], str]) -> None:
        """Return when it has reached `value`. Until then `look` is called now and then: what it returns, unless it is
        empty, is why this will not happen. Raises RankLost with that.
        """
        waited = False
        while (seen := self._words[self._index]) - value & MASK >= HALF:
            if waited and (why := look()) and not self.has(value):
                raise RankLost(why)
            waited = True
            _futex(FUTEX, self._address, FUTEX_WAIT, seen, ctypes.byref(_LOOK))


class WakeupPipe:
    """The named pipe at `path`. Its `owner` makes it and holds its lock; others ring it."""

    def __init__(self, path: Path, *, owner: bool) -> None:
        if owner:
            os.mkfifo(path, 0o600)
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        if owner:
            fcntl.flock(self.fd, fcntl.LOCK_EX)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it rings
            os.write(self.fd, b"!")

    def silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, mmap.PAGESIZE)

    def owner_lives(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        os.close(self.fd)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_LOOK = _Timespec(0, int(LOOK_S * 1e9))
