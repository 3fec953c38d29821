"""Transfer between two pools of one process: plain memory copies, for tests and for both roles in one process.

A read copies when it is polled, not when it is posted, so that callers see reads in flight here too.
"""

import ctypes
import threading
import uuid
from collections.abc import Sequence

from millrace_serve.transfer.base import MemoryHandle, PageBuffer, ReadState, TransferError, check_source
from millrace_serve.transfer.polled import PolledRead, PolledSink, SourcePeer


class LocalFabric:
    """Which agents live in this process. Given to every source and sink that should reach each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, PageBuffer] = {}

    def add(self, agent: str, pool: PageBuffer) -> None:
        with self._lock:
            self._pools[agent] = pool

    def remove(self, agent: str) -> None:
        with self._lock:
            self._pools.pop(agent, None)

    def has(self, agent: str) -> bool:
        return agent in self._pools

    def copy(self, agent: str, ours: PageBuffer, pairs: Sequence[tuple[int, int]]) -> bool:
        """Copies page src to our page dst for each (src, dst). False: the agent is gone, nothing was copied."""
        with self._lock:  # the exporter's memory must not go away in the middle
            pool = self._pools.get(agent)
            if pool is None:
                return False
            size = pool.page_bytes
            for src, dst in pairs:
                ctypes.memmove(ours.address + dst * size, pool.address + src * size, size)
            return True


class LocalSource:
    def __init__(self, fabric: LocalFabric, pool: PageBuffer, label: str = "local") -> None:
        self._fabric = fabric
        self._pool = pool
        self._agent = f"{label}-{uuid.uuid4().hex}"
        fabric.add(self._agent, pool)

    def handle(self) -> MemoryHandle:
        pool = self._pool
        return MemoryHandle("local", self._agent, b"", pool.address, pool.page_bytes, pool.num_pages)

    def close(self) -> None:
        self._fabric.remove(self._agent)


class LocalSink(PolledSink[SourcePeer]):
    """A read's handle is its (source page, destination page) pairs."""

    def __init__(self, fabric: LocalFabric, pool: PageBuffer) -> None:
        super().__init__(pool)
        self._fabric = fabric

    def open(self, source: MemoryHandle) -> SourcePeer:
        check_source(source, "local", self._pool)
        if not self._fabric.has(source.agent):
            raise TransferError(f"{source.agent} is not in this process")
        return SourcePeer(source.agent)

    def post(self, read: PolledRead[SourcePeer], src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
        read.handle = list(zip(src_pages, dst_pages, strict=True))

    def progress(self, read: PolledRead[SourcePeer]) -> None:
        if self._fabric.copy(read.peer.name, self._pool, read.handle):
            self.finish(read, ReadState.DONE)
        else:
            self.finish(read, ReadState.FAILED, f"{read.peer.name} is gone")

    def let_go(self, peer: SourcePeer) -> None:
        """Nothing was opened."""

    def close(self) -> None:
        for peer in list(self._peers.values()):
            for read in list(peer.reads):
                self.finish(read, ReadState.FAILED, "the importer was closed")
            self.disconnect(peer.name)
