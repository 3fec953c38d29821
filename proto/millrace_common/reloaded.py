"""Values made from files that are replaced while the process runs: certificates, API keys."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
Stamp = tuple[int, int, int] | None

INTERVAL_S = 1.0  # between two looks at the files


class Reloaded(Generic[T]):
    """Made by `load` at the beginning, whose errors are raised, and again after any of the files has changed.

    A later load that raises ValueError or OSError keeps the previous value: the file may be half written, or a
    certificate may not fit its key yet. The failure is logged, counted by `on_reload` ("ok" or "failed"), and the load
    is repeated when the files change again. Messages of `load` must hold no secrets. Safe to use from several threads.
    """

    def __init__(
        self,
        what: str,
        paths: Sequence[Path],
        load: Callable[[], T],
        on_reload: Callable[[str], None] = lambda outcome: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._paths = tuple(paths)
        self._load = load
        self._on_reload = on_reload
        self._clock = clock
        self._lock = threading.Lock()
        self._stamps = self._look()
        self._looked_at = clock()
        self._value = load()

    def get(self) -> T:
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= INTERVAL_S:
                self._looked_at = now
                stamps = self._look()
                if stamps != self._stamps:
                    self._stamps = stamps  # from before the load, so that a change during it is noticed next time
                    self._reload()
            return self._value

    def _reload(self) -> None:
        try:
            self._value = self._load()
        except (OSError, ValueError) as error:
            log.warning("%s: the changed files are not used: %s", self._what, error)
            self._on_reload("failed")
            return
        log.info("%s: loaded again", self._what)
        self._on_reload("ok")

    def _look(self) -> list[Stamp]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> Stamp:
    """Changes with the content, also where a symbolic link is moved to another folder (as mounted secrets are)."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
