"""Transfer between GPU pools of one host through CUDA IPC: the importer maps the exporter's pool and copies pages out.

NIXL's UCX backend has no such lane between two processes of the *same* GPU and goes through host memory instead
(measured in docs/log/2026-11.md). Here a read is one copy for each run of adjacent pages, on its own stream.

1. The exporter's handle names its host and the memory (`shared_memory_name`).
2. `connect` maps that memory; a peer of another host, or one that cannot be mapped, is refused.
3. `read` enqueues the copies and an event; the read is DONE when the event is reached. A copy cannot be cut short, so a
   read in flight always ends.
4. The mapping outlives the exporter's process: what is read after its death is discarded by the fenced Release.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from millrace_common.page_runs import runs

from millrace_serve.transfer.base import MemoryHandle, PageBuffer, ReadState, TransferError, check_source
from millrace_serve.transfer.cuda_driver import CudaDriver, CudaError
from millrace_serve.transfer.polled import PolledRead, PolledSink, SourcePeer

log = logging.getLogger(__name__)


class SharedMemory(msgspec.Struct, frozen=True):
    """The place of a pool for processes of the same host."""

    host: str
    handle: bytes
    offset: int  # of page 0 in what the handle opens


def shared_memory_name(pool: PageBuffer, driver: CudaDriver | None = None) -> bytes:
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


@dataclass(eq=False)
class IpcPeer(SourcePeer):
    opened: int  # what the driver mapped
    base: int  # page 0


class CudaIpcSink(PolledSink[IpcPeer]):
    """Reads the pools of any transport whose handle can be mapped. A read's handle is a CUDA event."""

    def __init__(self, pool: PageBuffer, driver: CudaDriver | None = None) -> None:
        super().__init__(pool)
        self._driver = driver or CudaDriver(pool.device_id)
        self._driver.bind()
        self._stream = self._driver.stream()
        self._closed = False

    def open(self, source: MemoryHandle) -> IpcPeer:
        check_source(source, source.transport, self._pool)
        if not same_host(source):
            raise TransferError(f"{source.agent} does not share its memory with this host")
        shared = msgspec.msgpack.decode(source.shared, type=SharedMemory)
        try:
            self._driver.bind()
            opened = self._driver.open(shared.handle)
        except CudaError as error:
            raise TransferError(f"the memory of {source.agent} cannot be mapped: {error}") from error
        return IpcPeer(source.agent, opened, opened + shared.offset)

    def post(self, read: PolledRead[IpcPeer], src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
        ours, theirs, size = self._pool.address, read.peer.base, self._pool.page_bytes
        self._driver.bind()
        try:
            for src, dst, count in runs(src_pages, dst_pages):
                self._driver.copy(ours + dst * size, theirs + src * size, count * size, self._stream)
            read.handle = self._driver.record(self._stream)
        except CudaError as error:
            self._driver.wait(self._stream)  # what was enqueued before must not write later
            raise TransferError(f"reading {len(src_pages)} pages of {read.peer.name} failed: {error}") from error

    def progress(self, read: PolledRead[IpcPeer]) -> None:
        try:
            self._driver.bind()
            if not self._driver.reached(read.handle):
                return
            self._driver.destroy_event(read.handle)
        except CudaError as failure:  # the context is lost: nothing is in flight any more
            self.finish(read, ReadState.FAILED, f"reading from {read.peer.name} failed: {failure}")
        else:
            self.finish(read, ReadState.DONE)

    def let_go(self, peer: IpcPeer) -> None:
        with contextlib.suppress(CudaError):  # of a lost context
            self._driver.close(peer.opened)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._driver.bind()
        self._driver.wait(self._stream)
        for peer in list(self._peers.values()):
            for read in list(peer.reads):
                read.poll()
            self.disconnect(peer.name)
        self._driver.destroy_stream(self._stream)
