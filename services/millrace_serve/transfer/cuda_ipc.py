"""Transfer between GPU pools of one host through CUDA IPC: the importer maps the exporter's pool and copies pages out.

NIXL's UCX backend has no such lane between two processes of the *same* GPU and goes through host memory instead
(measured in docs/log/2026-11-21.md). Here a read is one copy for each run of adjacent pages, on its own stream.

1. The exporter's handle names its host and the memory (`shared_memory_name`).
2. `connect` maps that memory; a peer of another host, or one that cannot be mapped, is refused.
3. `read` enqueues the copies and an event; the read is DONE when the event is reached. A copy cannot be cut short, so a
   read in flight always ends.
4. The mapping outlives the exporter's process: what is read after its death is discarded by the fenced Release.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from millrace_serve.transfer.base import (
    KvSink,
    MemoryHandle,
    PageBuffer,
    ReadOp,
    ReadState,
    TransferError,
    check_pages,
    check_source,
)
from millrace_serve.transfer.cuda_driver import CudaDriver, CudaError

log = logging.getLogger(__name__)


class Driver(Protocol):
    """What of the CUDA driver a transfer needs; cuda_driver.py has the real one."""

    def bind(self) -> None: ...
    def export(self, address: int) -> tuple[bytes, int]: ...
    def open(self, handle: bytes) -> int: ...
    def close(self, address: int) -> None: ...
    def stream(self) -> Any: ...
    def copy(self, dst: int, src: int, nbytes: int, stream: Any) -> None: ...
    def record(self, stream: Any) -> Any: ...
    def reached(self, event: Any) -> bool: ...
    def destroy_event(self, event: Any) -> None: ...
    def wait(self, stream: Any) -> None: ...
    def destroy_stream(self, stream: Any) -> None: ...


class SharedMemory(msgspec.Struct, frozen=True):
    """How a process of the same host finds a pool."""

    host: str
    handle: bytes
    offset: int  # of page 0 in what the handle opens


def shared_memory_name(pool: PageBuffer, driver: Driver | None = None) -> bytes:
    """`MemoryHandle.shared` of a pool in GPU memory; empty when the driver cannot share it, which is logged."""
    try:
        driver = driver or CudaDriver(pool.device_id)
        driver.bind()
        handle, offset = driver.export(pool.address)
    except CudaError as error:
        log.warning("the pool cannot be shared with other processes of this host: %s", error)
        return b""
    return msgspec.msgpack.encode(SharedMemory(host_id(), handle, offset))


def host_id() -> str:
    """Equal for processes of one running kernel, in containers too."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def same_host(source: MemoryHandle) -> bool:
    return bool(source.shared) and msgspec.msgpack.decode(source.shared, type=SharedMemory).host == host_id()


class CudaIpcSink(KvSink):
    """Reads the pools of any transport whose handle says how to map them."""

    def __init__(self, pool: PageBuffer, driver: Driver | None = None) -> None:
        self._pool = pool
        self._driver = driver or CudaDriver(pool.device_id)
        self._driver.bind()
        self._stream = self._driver.stream()
        self._peers: dict[str, _Peer] = {}
        self._closed = False

    def connect(self, source: MemoryHandle) -> None:
        check_source(source, source.transport, self._pool)
        if not same_host(source):
            raise TransferError(f"{source.agent} does not share its memory with this host")
        if peer := self._peers.get(source.agent):
            peer.leaving = False
            return
        shared = msgspec.msgpack.decode(source.shared, type=SharedMemory)
        try:
            self._driver.bind()
            opened = self._driver.open(shared.handle)
        except CudaError as error:
            raise TransferError(f"the memory of {source.agent} cannot be mapped: {error}") from error
        self._peers[source.agent] = _Peer(source.agent, opened, opened + shared.offset)

    def read(self, source: MemoryHandle, src_pages: Sequence[int], dst_pages: Sequence[int]) -> ReadOp:
        peer = self._peers.get(source.agent)
        if peer is None or peer.leaving:
            raise TransferError(f"{source.agent} is not connected")
        check_pages(source, self._pool, src_pages, dst_pages)
        size = self._pool.page_bytes
        self._driver.bind()
        op = _IpcRead(self, peer)
        try:
            for src, dst, count in runs(src_pages, dst_pages):
                self._driver.copy(self._pool.address + dst * size, peer.base + src * size, count * size, self._stream)
            op.event = self._driver.record(self._stream)
        except CudaError as error:
            self._driver.wait(self._stream)  # what was enqueued before must not write later
            raise TransferError(f"reading {len(src_pages)} pages of {source.agent} failed: {error}") from error
        peer.reads.add(op)
        return op

    def disconnect(self, agent: str) -> None:
        if peer := self._peers.get(agent):
            peer.leaving = True
            self._drop_if_unused(peer)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._driver.bind()
        self._driver.wait(self._stream)
        for peer in list(self._peers.values()):
            peer.leaving = True
            for op in list(peer.reads):
                op.poll()
            self._drop_if_unused(peer)
        self._driver.destroy_stream(self._stream)

    def finish(self, op: _IpcRead) -> tuple[ReadState, str]:
        """Where `op` is now, and why it failed."""
        state, error = ReadState.DONE, ""
        try:
            self._driver.bind()
            if not self._driver.reached(op.event):
                return ReadState.PENDING, ""
            self._driver.destroy_event(op.event)
        except CudaError as failure:  # the context is lost: nothing is in flight any more
            state, error = ReadState.FAILED, f"reading from {op.peer.name} failed: {failure}"
        op.peer.reads.discard(op)
        self._drop_if_unused(op.peer)
        return state, error

    def _drop_if_unused(self, peer: _Peer) -> None:
        if peer.leaving and not peer.reads and peer.name in self._peers:
            del self._peers[peer.name]
            with contextlib.suppress(CudaError):  # of a lost context
                self._driver.close(peer.opened)


class _Peer:
    def __init__(self, name: str, opened: int, base: int) -> None:
        self.name = name
        self.opened = opened  # what the driver mapped
        self.base = base  # page 0
        self.reads: set[_IpcRead] = set()  # not final
        self.leaving = False


class _IpcRead(ReadOp):
    def __init__(self, sink: CudaIpcSink, peer: _Peer) -> None:
        self._sink = sink
        self.peer = peer
        self.event: Any = None
        self._state, self._error = ReadState.PENDING, ""

    def poll(self) -> ReadState:
        if self._state is ReadState.PENDING:
            self._state, self._error = self._sink.finish(self)
        return self._state

    @property
    def error(self) -> str:
        return self._error


def runs(src_pages: Sequence[int], dst_pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(src, dst, count) of pages that are adjacent on both sides, in order."""
    first, count = 0, 0
    for src, dst in zip(src_pages, dst_pages, strict=True):
        if count and src == src_pages[first] + count and dst == dst_pages[first] + count:
            count += 1
            continue
        if count:
            yield src_pages[first], dst_pages[first], count
        first, count = first + count, 1
    if count:
        yield src_pages[first], dst_pages[first], count
