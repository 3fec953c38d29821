"""Blocks (millrace_common/page_hash.py) that the tiers of a prefix cache stored and removed since the last `take`.

Only the difference counts: a block that was stored and removed again is in neither list. So the order does not matter,
and a collector that is never emptied is no larger than the two states.
"""

from millrace_serve.engine.core import CacheChange


class TierChanges:
    __slots__ = ("is_stored",)

    def __init__(self) -> None:
        self.is_stored: dict[bytes, bool] = {}  # by block; False: it was removed

    def store(self, block: bytes) -> None:
        if not self.is_stored.setdefault(block, True):
            del self.is_stored[block]

    def remove(self, block: bytes) -> None:
        if self.is_stored.setdefault(block, False):
            del self.is_stored[block]

    def add(self, stored: list[bytes], removed: list[bytes]) -> None:
        for block in removed:
            self.remove(block)
        for block in stored:
            self.store(block)

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return and clear the changes: stored blocks, each after its predecessors in the chain, and removed ones."""
        changed, self.is_stored = self.is_stored, {}
        return [b for b, stored in changed.items() if stored], [b for b, stored in changed.items() if not stored]


class CacheChanges:
    __slots__ = ("device", "host")

    def __init__(self) -> None:
        self.device, self.host = TierChanges(), TierChanges()

    def __bool__(self) -> bool:
        return bool(self.device.is_stored or self.host.is_stored)

    def add(self, change: CacheChange) -> None:
        self.device.add(change.stored, change.removed)
        self.host.add(change.host_stored, change.host_removed)

    def take(self) -> CacheChange | None:
        """Return and clear the changes; None when there are none."""
        return CacheChange(*self.device.take(), *self.host.take()) if self else None
