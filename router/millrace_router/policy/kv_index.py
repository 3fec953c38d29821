"""The content of the workers' prefix caches, as the workers report it.

Life of a holder (one replica of one process):

1. a snapshot adds it, with the sequence number of its state
2. each change names the number that it follows; any other than the latest is a gap: the holder is forgotten, `apply`
   returns False, and the caller requests a new snapshot
3. `forget`, when the process or the connection is gone

The table is cut into shards: no operation copies or walks all of it. Bits of forgotten holders stay in the masks and
are ignored; every change cleans some shards of them, and after a whole round the bits are given again.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.v1.worker_pb2 import CacheChange

from millrace_router.policy.holders import Bits, Process

SHARDS = 256
SHARDS_PER_CHANGE = 2  # cleaned while there are dead bits


class KvIndex:
    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]  # block -> holders
        self._bits = Bits()
        self._sequences: dict[Process, int] = {}
        self._cleaning = 0  # dead bits of this round
        self._clean_from = 0  # the round's next shard

    def __len__(self) -> int:
        """Blocks, those included that only forgotten holders had and that are not cleaned yet."""
        return sum(map(len, self._shards))

    def apply(self, holder: Process, change: CacheChange) -> bool:
        """Apply one change. False: a change was missed, and the holder has no entries until its next snapshot."""
        if change.snapshot:
            self.forget(holder)
        elif self._sequences.get(holder) != change.after:
            self.forget(holder)
            return False
        self._sequences[holder] = change.sequence
        shards, bit = self._shards, self._bits.of(holder)
        for block in change.removed:
            shard = shards[block % SHARDS]
            mask = shard.get(block, 0) & ~bit
            if mask:
                shard[block] = mask
            else:
                shard.pop(block, None)
        for block in change.stored:
            shard = shards[block % SHARDS]
            mask = shard.get(block, 0)
            shard[block] = mask | bit if mask else bit
        self._clean()
        return True

    def forget(self, holder: Process) -> None:
        self._sequences.pop(holder, None)
        self._bits.drop(holder)

    def lookup(self, hashes: Sequence[int]) -> dict[Process, int]:
        """Leading blocks that each holder has; none: not in the answer."""
        shards = self._shards
        return self._bits.leading(hashes, lambda block: shards[block % SHARDS].get(block, 0))

    def _clean(self) -> None:
        if not self._cleaning:
            self._cleaning, self._clean_from = self._bits.dead, 0
        for _ in range(SHARDS_PER_CHANGE if self._cleaning else 0):
            shard = self._shards[self._clean_from]
            for block, mask in list(shard.items()):
                if mask & self._cleaning:
                    if mask := mask & ~self._cleaning:
                        shard[block] = mask
                    else:
                        del shard[block]
            self._clean_from += 1
            if self._clean_from == SHARDS:
                self._bits.recycle(self._cleaning)
                self._cleaning = 0
                return
