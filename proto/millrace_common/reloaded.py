"""Values made from files that are replaced while the process runs: certificates, API keys."""

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

INTERVAL_S = 1.0  # between two looks at the files


class Reloaded(Generic[T]):
    """Made by `load` at the beginning, whose errors are raised as OSErrors about `section`, and again after the content
    of any file has changed.

    A later load that raises ValueError or OSError keeps the previous value: the file may be half written, or a
    certificate may not fit its key yet. `error` says why, until a load succeeds, which is tried at every look. Every
    try is counted by `on_reload` ("ok" or "failed"), and each error logged once. Messages of `load` must hold no
    secrets. Safe to use from several threads.
    """

    def __init__(
        self,
        section: str,
        what: str,
        paths: Sequence[Path],
        load: Callable[[], T],
        on_reload: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._what = what
        self._paths = tuple(paths)
        self._load = load
        self._on_reload = on_reload
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_at = clock()
        self._contents = self._look()
        try:
            self._value = load()
        except (OSError, ValueError) as error:
            raise OSError(f"{section}: {error}") from error
        self.error = ""  # why the value is not that of the present files; empty: it is

    def get(self) -> T:
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= INTERVAL_S:
                self._looked_at = now
                contents = self._look()
                if contents != self._contents or self.error:
                    self._contents = contents  # from before the load, so that a change during it is noticed next time
                    self._reload()
            return self._value

    def _reload(self) -> None:
        try:
            self._value = self._load()
        except (OSError, ValueError) as error:
            if str(error) != self.error:
                log.warning("%s: the changed files are not used: %s", self._what, error)
            self.error = str(error)
            self._on_reload("failed")
            return
        self.error = ""
        log.info("%s: loaded again", self._what)
        self._on_reload("ok")

    def _look(self) -> list[bytes]:
        return [_digest(path) for path in self._paths]


def _digest(path: Path) -> bytes:
    """Of the content: times, sizes and inodes can stay the same when it changes. Empty: the file cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return b""
