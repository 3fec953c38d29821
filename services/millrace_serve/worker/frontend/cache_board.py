"""The content of the engines' prefix caches, for routers (WatchCache).

The board mirrors each replica's cache from the changes that its engine reports, and numbers its states. A watcher gets
the mirror as a snapshot and then the difference to its last message, so a slow watcher gets fewer, larger messages, and
its backlog is never larger than the cache.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator

import msgspec
from millrace.v1 import worker_pb2

from millrace_serve.engine.cache.changes import CacheChanges
from millrace_serve.engine.core import CacheChange
from millrace_serve.worker.frontend.wakeup import Wakeup

CHUNK = 8192  # blocks in one change of a snapshot: a watcher takes each in a few milliseconds


# The blocks on the device, each after those before it in its chain, and those in the host's memory.
Tiers = tuple[dict[bytes, None], dict[bytes, None]]


class CacheBoard:
    def __init__(self, replicas: int, epoch: str) -> None:
        self.epoch = epoch
        self._blocks: list[Tiers] = [({}, {}) for _ in range(replicas)]
        self._sequences = [0] * replicas
        self._watchers: set[_Watcher] = set()

    def update(self, replica: int, change: CacheChange) -> None:
        device, host = self._blocks[replica]
        _apply(device, change.stored, change.removed)
        _apply(host, change.host_stored, change.host_removed)
        self._sequences[replica] += 1
        for watcher in self._watchers:
            watcher.add(replica, change)

    def restart(self) -> None:
        """The engines are gone, and what they had cached."""
        for replica, (device, host) in enumerate(self._blocks):
            if device or host:
                self.update(replica, CacheChange([], list(device), [], list(host)))

    async def watch(self, min_interval_s: float) -> AsyncIterator[worker_pb2.CacheChanges]:
        """Snapshots at once, then changes, at most one message each `min_interval_s`."""
        watcher = _Watcher(self._sequences)
        self._watchers.add(watcher)
        blocks = [(list(device), list(host)) for device, host in self._blocks]
        snapshots = list(zip(self._sequences, blocks, strict=True))  # all of the same moment
        try:
            for replica, (sequence, tiers) in enumerate(snapshots):
                for change in _snapshot(replica, sequence, *tiers):
                    yield worker_pb2.CacheChanges(epoch=self.epoch, changes=[change])
            while True:
                if not watcher.behind:
                    await watcher.changed.wait()
                yield worker_pb2.CacheChanges(epoch=self.epoch, changes=watcher.take(self._sequences))
                await asyncio.sleep(min_interval_s)
        finally:
            self._watchers.discard(watcher)


class _Watcher:
    """The changes that one stream has not got yet."""

    def __init__(self, sequences: list[int]) -> None:
        self.changed = Wakeup()
        self._told = list(sequences)
        self._pending = [CacheChanges() for _ in sequences]

    @property
    def behind(self) -> bool:
        return any(self._pending)

    def add(self, replica: int, change: CacheChange) -> None:
        self._pending[replica].add(change)
        self.changed.fire()

    def take(self, sequences: list[int]) -> list[worker_pb2.CacheChange]:
        """One change for each replica that is in another state."""
        found = []
        for replica, (after, sequence) in enumerate(zip(self._told, sequences, strict=True)):
            if after != sequence:
                blocks = msgspec.structs.asdict(self._pending[replica].take() or CacheChange([], []))
                found.append(worker_pb2.CacheChange(replica=replica, after=after, sequence=sequence, **blocks))
        self._told = list(sequences)
        return found


def _apply(blocks: dict[bytes, None], stored: list[bytes], removed: list[bytes]) -> None:
    for block in removed:
        blocks.pop(block, None)
    for block in stored:
        blocks[block] = None


def _snapshot(replica: int, sequence: int, device: list[bytes], host: list[bytes]) -> Iterator[worker_pb2.CacheChange]:
    for start in range(0, max(len(device), len(host), 1), CHUNK):
        yield worker_pb2.CacheChange(
            replica=replica,
            after=sequence,
            sequence=sequence,
            snapshot=start == 0,
            stored=device[start : start + CHUNK],
            host_stored=host[start : start + CHUNK],
        )
