"""The content of the engines' prefix caches, for routers (WatchCache).

The board mirrors each replica's cache from the changes that its engine reports, and numbers its states. A watcher gets
the mirror as a snapshot and then the difference to its last message, so a slow watcher gets fewer, larger messages, and
its backlog is never larger than the cache.
"""

import asyncio
from collections.abc import AsyncIterator

import msgspec
from millrace.v1 import worker_pb2

from millrace_serve.engine.cache.changes import CacheChanges
from millrace_serve.engine.core import CacheChange
from millrace_serve.worker.frontend.wakeup import Wakeup

CHUNK = 8192  # blocks in one change of a snapshot: a watcher takes each in a few milliseconds


class CacheBoard:
    def __init__(self, replicas: int, epoch: str) -> None:
        self.epoch = epoch
        self._contents = [CacheChanges() for _ in range(replicas)]  # since the start
        self._sequences = [0] * replicas
        self._watchers: set[_Watcher] = set()

    def update(self, replica: int, change: CacheChange) -> None:
        self._contents[replica].add(change)
        self._sequences[replica] += 1
        for watcher in self._watchers:
            watcher.add(replica, change)

    def restart(self) -> None:
        """The engines are gone, and what they had cached."""
        for replica, content in enumerate(self._contents):
            if content:
                self.update(replica, content.undone())

    async def watch(self, min_interval_s: float) -> AsyncIterator[worker_pb2.CacheChanges]:
        """Snapshots at once, then changes, at most one message each `min_interval_s`."""
        watcher = _Watcher(self._sequences)
        self._watchers.add(watcher)
        contents = [content.parts(CHUNK) for content in self._contents]
        snapshots = list(zip(self._sequences, contents, strict=True))  # all of the same moment
        try:
            for replica, (sequence, parts) in enumerate(snapshots):
                for index, part in enumerate(parts):
                    change = _wire(replica, sequence, sequence, part, snapshot=index == 0)
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
                found.append(_wire(replica, after, sequence, self._pending[replica].take() or CacheChange([], [])))
        self._told = list(sequences)
        return found


def _wire(replica: int, after: int, to: int, change: CacheChange, snapshot: bool = False) -> worker_pb2.CacheChange:
    blocks = msgspec.structs.asdict(change)
    return worker_pb2.CacheChange(replica=replica, after=after, sequence=to, snapshot=snapshot, **blocks)
