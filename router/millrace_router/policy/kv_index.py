"""The content of the workers' prefix caches, as the workers report it.

Life of a holder (one replica of one process):

1. a snapshot adds it, with the sequence number of its state
2. each change names the number that it follows; any other than the latest is a gap: the holder is forgotten, `apply`
   returns False, and the caller requests a new snapshot
3. `forget`, when the process or the connection is gone

The pages on a worker's device and their copies in its host's memory are two tables; the prefix on a host goes on where
the one on its device ends.

A table is cut into shards: no operation copies or walks all of it. Bits of forgotten holders stay in the masks and
are ignored; every change cleans some shards of them, and after a whole round the bits are given again.
"""

from collections.abc import Iterable, Mapping, Sequence

from millrace.v1.worker_pb2 import CacheChange

from millrace_router.policy.holders import Bits, Process

SHARDS = 256
SHARDS_PER_CHANGE = 2  # cleaned while there are dead bits
HOST_WEIGHT = 0.9  # of a page in the host's memory: it is copied back first, at a fraction of the cost of computing it


class KvIndex:
    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]  # block -> holders on the device
        self._host: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self._has_host = False
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
        bit = self._bits.of(holder)
        _change(self._shards, bit, change.stored, change.removed)
        if change.host_stored or self._has_host:
            _change(self._host, bit, change.host_stored, change.host_removed)
            self._has_host = True
        self._clean()
        return True

    def forget(self, holder: Process) -> None:
        self._sequences.pop(holder, None)
        self._bits.drop(holder)

    def lookup(self, blocks: Sequence[bytes]) -> dict[Process, int]:
        """Leading blocks that each holder has on its device; none: not in the answer."""
        shards = self._shards
        return self._bits.leading(blocks, lambda block: shards[hash(block) % SHARDS].get(block, 0))

    def weighted(self, blocks: Sequence[bytes], on_device: Mapping[Process, int]) -> Mapping[Process, float]:
        """The same with the blocks that follow in the host's memory, which count for less. `on_device`: of `lookup`."""
        if not self._has_host:
            return on_device
        device, host = self._shards, self._host

        def either(block: bytes) -> int:
            shard = hash(block) % SHARDS
            return device[shard].get(block, 0) | host[shard].get(block, 0)

        found = self._bits.leading(blocks, either)
        on = {holder: on_device.get(holder, 0) for holder in found}
        return {holder: on[holder] + HOST_WEIGHT * (depth - on[holder]) for holder, depth in found.items()}

    def _clean(self) -> None:
        if not self._cleaning:
            self._cleaning, self._clean_from = self._bits.dead, 0
        for _ in range(SHARDS_PER_CHANGE if self._cleaning else 0):
            for shard in (self._shards[self._clean_from], self._host[self._clean_from]):
                for block, mask in list(shard.items()):
                    if mask & self._cleaning:
                        _put(shard, block, mask & ~self._cleaning)
            self._clean_from += 1
            if self._clean_from == SHARDS:
                self._bits.recycle(self._cleaning)
                self._cleaning = 0
                return


def _change(shards: list[dict[bytes, int]], bit: int, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
    for block in removed:
        shard = shards[hash(block) % SHARDS]
        _put(shard, block, shard.get(block, 0) & ~bit)
    for block in stored:
        shard = shards[hash(block) % SHARDS]
        mask = shard.get(block, 0)
        shard[block] = mask | bit if mask else bit  # one int for all blocks that only this holder has


def _put(shard: dict[bytes, int], block: bytes, mask: int) -> None:
    if mask:
        shard[block] = mask
    else:
        shard.pop(block, None)
