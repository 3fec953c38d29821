"""Blocks (millrace_common/page_hash.py) that a prefix cache stored and removed since the last `take`.

Only the difference counts: a block that was stored and removed again is in neither list. So the order does not matter,
and a collector that is never emptied is no larger than the two states.
"""

from __future__ import annotations

from collections.abc import Iterable

from millrace_serve.engine.core import CacheChange


class CacheChanges:
    __slots__ = ("_removed", "_stored")

    def __init__(self, stored: Iterable[int] = ()) -> None:
        self._stored = dict.fromkeys(stored)
        self._removed: dict[int, None] = {}

    def __bool__(self) -> bool:
        return bool(self._stored or self._removed)

    def store(self, block: int) -> None:
        if block in self._removed:
            del self._removed[block]
        else:
            self._stored[block] = None

    def remove(self, block: int) -> None:
        if block in self._stored:
            del self._stored[block]
        else:
            self._removed[block] = None

    def add(self, change: CacheChange) -> None:
        for block in change.removed:
            self.remove(block)
        for block in change.stored:
            self.store(block)

    def take(self) -> CacheChange | None:
        """Return and clear the changes, each block after its predecessors in the chain; None when there are none."""
        if not self:
            return None
        change = CacheChange(list(self._stored), list(self._removed))
        self._stored, self._removed = {}, {}
        return change
