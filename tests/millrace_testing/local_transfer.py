"""Transfer between two pools of one process: plain memory copies, for tests and for both roles in one process.

A read copies when it is polled, not when it is posted, so that callers see reads in flight here too.
"""

from __future__ import annotations

import ctypes
import threading
import uuid
from collections.abc import Sequence

from millrace_serve.transfer.base import (
    KvSink,
    KvSource,
    MemoryHandle,
    PageBuffer,
    ReadOp,
    ReadState,
    TransferError,
    check_pages,
    check_source,
)


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


class LocalSource(KvSource):
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


class LocalSink(KvSink):
    def __init__(self, fabric: LocalFabric, pool: PageBuffer) -> None:
        self._fabric = fabric
        self._pool = pool
        self._connected: set[str] = set()
        self._in_flight: set[_LocalRead] = set()

    def connect(self, source: MemoryHandle) -> None:
        check_source(source, "local", self._pool)
        if not self._fabric.has(source.agent):
            raise TransferError(f"{source.agent} is not in this process")
        self._connected.add(source.agent)

    def read(self, source: MemoryHandle, src_pages: Sequence[int], dst_pages: Sequence[int]) -> ReadOp:
        if source.agent not in self._connected:
            raise TransferError(f"{source.agent} is not connected")
        check_pages(source, self._pool, src_pages, dst_pages)
        op = _LocalRead(self, source.agent, list(zip(src_pages, dst_pages, strict=True)))
        self._in_flight.add(op)
        return op

    def disconnect(self, agent: str) -> None:
        self._connected.discard(agent)

    def close(self) -> None:
        self._connected.clear()
        for op in list(self._in_flight):
            op.fail("the importer was closed")

    def finish(self, op: _LocalRead) -> ReadState:
        """Copies what `op` asked for, now."""
        copied = self._fabric.copy(op.agent, self._pool, op.pairs)
        self._in_flight.discard(op)
        return ReadState.DONE if copied else ReadState.FAILED


class _LocalRead(ReadOp):
    def __init__(self, sink: LocalSink, agent: str, pairs: list[tuple[int, int]]) -> None:
        self._sink = sink
        self.agent = agent
        self.pairs = pairs
        self._state = ReadState.PENDING
        self._error = ""

    def poll(self) -> ReadState:
        if self._state is ReadState.PENDING:
            self._state = self._sink.finish(self)
            if self._state is ReadState.FAILED:
                self._error = f"{self.agent} is gone"
        return self._state

    def fail(self, reason: str) -> None:
        self._state, self._error = ReadState.FAILED, reason

    @property
    def error(self) -> str:
        return self._error
