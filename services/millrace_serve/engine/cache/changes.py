"""Blocks (millrace_common/page_hash.py) that a prefix cache stored and removed since the last `take`.

Only the difference counts: a block that was stored and removed again is in neither list. So the order does not matter,
and a collector that is never emptied is no larger than the two states.
"""

from __future__ import annotations

from collections.abc import Iterable

from millrace_serve.engine.core import CacheChange


class CacheChanges:
    __slots__ = ("_is_stored",)

    def __init__(self, stored: Iterable[int] = ()) -> None:
        self._is_stored = dict.fromkeys(stored, True)  # by block; False: it was removed

    def __bool__(self) -> bool:
        return bool(self._is_stored)

    def store(self, block: int) -> None:
        if not self._is_stored.setdefault(block, True):
            del self._is_stored[block]

    def remove(self, block: int) -> None:
        if self._is_stored.setdefault(block, False):
            del self._is_stored[block]

    def add(self, change: CacheChange) -> None:
        for block in change.removed:
            self.remove(block)
        for block in change.stored:
            self.store(block)

    def take(self) -> CacheChange | None:
        """Return and clear the changes, each block after its predecessors in the chain; None when there are none."""
        if not self:
            return None
        changed, self._is_stored = self._is_stored, {}
        return CacheChange([b for b, stored in changed.items() if stored], [b for b, s in changed.items() if not s])
