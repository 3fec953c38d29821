"""Holders of prefixes: the common part of both indexes.

A block (millrace_common/page_hash.py) is the digest of a page and everything before it.
Its holders are a bit mask, one bit per prefix cache. A cache is prefix-closed: a holder of a block holds all blocks
before it. So along a prompt the masks only shrink, and each holder's cached prefix ends where its bit vanishes:
`depths` finds these places by bisection, with a few look-ups for a prompt of any length.
"""

from collections.abc import Callable, Iterator, Sequence

Process = tuple[str, int]  # epoch of a worker, and the replica's index: whose prefix cache it is


class Bits:
    """A bit for each holder. The bit of one that is gone is given again only after `recycle`."""

    def __init__(self) -> None:
        self.live = 0  # mask of the holders that are known
        self.dead = 0  # mask of those that are gone and may still be in some block's mask
        self._bit_of: dict[Process, int] = {}
        self._holders: dict[int, Process] = {}

    def __iter__(self) -> Iterator[Process]:
        return iter(list(self._bit_of))

    def of(self, holder: Process) -> int:
        """The holder's bit as a mask, a new one at its first call."""
        bit = self._bit_of.get(holder)
        if bit is None:
            used = self.live | self.dead
            bit = ~used & (used + 1)  # the lowest that is free
            self._bit_of[holder] = bit
            self._holders[bit] = holder
            self.live |= bit
        return bit

    def drop(self, holder: Process) -> None:
        bit = self._bit_of.pop(holder, 0)
        if bit:
            del self._holders[bit]
            self.live ^= bit
            self.dead |= bit

    def recycle(self, bits: int) -> None:
        """No block's mask has these dead bits any more."""
        self.dead &= ~bits

    def holders(self, mask: int) -> Iterator[Process]:
        while mask:
            bit = mask & -mask
            yield self._holders[bit]
            mask ^= bit

    def leading(self, blocks: Sequence[bytes], lookup: Callable[[bytes], int]) -> dict[Process, int]:
        """Leading blocks that each known holder has; none: not in the answer. `lookup` as of `depths`."""
        found = depths(blocks, lookup, self.live)
        return {holder: depth for depth, mask in found for holder in self.holders(mask)}


def depths(blocks: Sequence[bytes], lookup: Callable[[bytes], int], live: int) -> list[tuple[int, int]]:
    """Return (number of leading blocks, mask of the holders with exactly so many). `lookup` gives a block's mask, 0 for
    an unknown one; holders without a block are left out.
    """
    if not blocks:
        return []
    found = []
    last = lookup(blocks[-1]) & live
    if last:
        found.append((len(blocks), last))
    pending = [(0, live, len(blocks), last)]  # ranges of a shrinking mask: (blocks, mask, more blocks, mask)
    while pending:
        low, wide, high, narrow = pending.pop()
        if wide == narrow:
            continue
        if high - low == 1:
            if low:
                found.append((low, wide & ~narrow))
            continue
        middle = (low + high) // 2
        mask = lookup(blocks[middle - 1]) & wide | narrow
        pending += ((low, wide, middle, mask), (middle, mask, high, narrow))
    return found
