"""The prompts that this router has sent to each worker: an estimate of the workers' prefix caches without their help.

Bounded by `max_blocks`; the least recently used block goes first. A prompt touches its blocks from the last to the
first, so a block is never older than those behind it, and the index stays prefix-closed. Evictions by a worker are not
noticed; kv_index.py covers them.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from millrace_router.policy.holders import Bits, Process

MAX_DEAD = 64  # bits of lost workers before the masks are cleaned, all at once: some 0.1 s per million blocks


class PrefixIndex:
    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._masks: OrderedDict[bytes, int] = OrderedDict()  # block -> holders, least recently used first
        self._bits = Bits()

    def __len__(self) -> int:
        return len(self._masks)

    def note(self, blocks: Sequence[bytes], holders: Iterable[Process]) -> None:
        """A prompt with these blocks was sent there."""
        masks, bits = self._masks, 0
        for holder in holders:
            bits |= self._bits.of(holder)
        for block in reversed(blocks[: self._max_blocks]):
            mask = masks.get(block)
            if mask is None:
                masks[block] = bits  # as the youngest
                continue
            if mask & bits != bits:
                masks[block] = mask | bits
            masks.move_to_end(block)
        while len(masks) > self._max_blocks:
            masks.popitem(last=False)

    def lookup(self, blocks: Sequence[bytes]) -> dict[Process, int]:
        """Leading blocks that each holder has; none: not in the answer."""
        masks = self._masks
        return self._bits.leading(blocks, lambda block: masks.get(block, 0))

    def keep(self, holders: set[Process]) -> None:
        """Keep these processes, and forget all others."""
        for holder in self._bits:
            if holder not in holders:
                self._bits.drop(holder)
        dead = self._bits.dead
        if dead.bit_count() >= MAX_DEAD:
            kept = ((block, mask & ~dead) for block, mask in self._masks.items())
            self._masks = OrderedDict((block, mask) for block, mask in kept if mask)
            self._bits.recycle(dead)
