"""Blocks (millrace_common/page_hash.py) that a prefix cache stored and removed since the last `take`.

Only the difference counts: a block that was stored and removed again is in neither list. So the order does not matter,
and a collector that is never emptied is no larger than the two states. One from the start has what the cache has.
"""

from millrace_serve.engine.core import CacheChange


class BlockChanges:
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
        """Return and clear the changes, as `look` has them."""
        changes, self.is_stored = self.look(), {}
        return changes

    def look(self) -> tuple[list[bytes], list[bytes]]:
        """Stored blocks, each after its predecessors in the chain, and removed ones."""
        changed = self.is_stored.items()
        return [block for block, stored in changed if stored], [block for block, stored in changed if not stored]


class CacheChanges:
    def __init__(self) -> None:
        self.device, self.host = BlockChanges(), BlockChanges()

    def __bool__(self) -> bool:
        return bool(self.device.is_stored or self.host.is_stored)

    def add(self, change: CacheChange) -> None:
        self.device.add(change.stored, change.removed)
        self.host.add(change.host_stored, change.host_removed)

    def take(self) -> CacheChange | None:
        """Return and clear the changes; None when there are none."""
        return CacheChange(*self.device.take(), *self.host.take()) if self else None

    def undone(self) -> CacheChange:
        """The change that takes all of them back."""
        return CacheChange(*self.device.look()[::-1], *self.host.look()[::-1])

    def parts(self, most: int) -> list[CacheChange]:
        """What was stored, in one part at least, each with at most so many blocks of a kind."""
        (device, _), (host, _) = self.device.look(), self.host.look()
        starts = range(0, max(len(device), len(host), 1), most)
        return [CacheChange(device[at : at + most], [], host[at : at + most]) for at in starts]
