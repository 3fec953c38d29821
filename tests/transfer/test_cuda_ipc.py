"""Reading another process's GPU pool: the bookkeeping against a driver made of host memory, the real thing on a GPU."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing as mp
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.page_runs import runs
from millrace_serve.transfer.base import KvSink, MemoryHandle, PageBuffer, ReadOp, ReadState, TransferError
from millrace_serve.transfer.cuda_driver import CudaDriver, CudaError
from millrace_serve.transfer.cuda_ipc import CudaIpcSink, SharedMemory, host_id, shared_memory_name
from millrace_serve.transfer.nearest import NearestSink
from transfer.pools import POISON, Pool, finish

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class HostDriver(CudaDriver):
    """Host memory in the place of a GPU's; copies happen when their event is looked at."""

    def __init__(self) -> None:
        self.mapped: dict[int, int] = {}
        self.queue: list[tuple[int, int, int]] = []
        self.events: set[int] = set()
        self.copies = 0
        self.lost = False

    def bind(self) -> None:
        pass

    def export(self, address: int) -> tuple[bytes, int]:
        return (address - 32).to_bytes(8, "little"), 32

    def open(self, handle: bytes) -> int:
        address = int.from_bytes(handle, "little")
        if address in self.mapped:
            raise CudaError("already mapped (208)")
        self.mapped[address] = 1
        return address

    def close(self, address: int) -> None:
        del self.mapped[address]

    def stream(self) -> str:
        return "stream"

    def copy(self, dst: int, src: int, nbytes: int, stream: str) -> None:
        if self.lost:
            raise CudaError("the context is lost (700)")
        self.queue.append((dst, src, nbytes))
        self.copies += 1

    def record(self, stream: str) -> int:
        self.events.add(self.copies)
        return self.copies

    def reached(self, event: int) -> bool:
        if self.lost:
            raise CudaError("the context is lost (700)")
        self.wait("stream")
        return True

    def destroy_event(self, event: int) -> None:
        self.events.remove(event)

    def wait(self, stream: str) -> None:
        for dst, src, nbytes in self.queue:
            ctypes.memmove(dst, src, nbytes)
        self.queue.clear()

    def destroy_stream(self, stream: str) -> None:
        pass


class Exporter:
    def __init__(self, driver: HostDriver, seed: int = 1, num_pages: int = 16) -> None:
        self.pool = Pool(num_pages, 4096, seed)
        buffer, self.pages = self.pool.buffer, self.pool.pages
        shared = shared_memory_name(buffer, driver)
        self.handle = MemoryHandle("nixl", f"exporter{seed}", b"", buffer.address, 4096, num_pages, shared=shared)


@pytest.fixture
def driver() -> HostDriver:
    return HostDriver()


def test_pages_arrive_and_neighbours_travel_together(driver: HostDriver) -> None:
    exporter, pool = Exporter(driver), Pool(8, 4096)
    sink = CudaIpcSink(pool.buffer, driver)
    sink.connect(exporter.handle)
    op = sink.read(exporter.handle, [3, 4, 5, 9, 1], [0, 1, 2, 3, 6])
    assert (pool.pages == POISON).all()
    assert finish(op) is ReadState.DONE and driver.copies == 3 and not driver.events
    assert np.array_equal(pool.pages[[0, 1, 2, 3, 6]], exporter.pages[[3, 4, 5, 9, 1]])
    assert (pool.pages[[4, 5, 7]] == POISON).all()


def test_mapping_lives_as_long_as_it_is_used(driver: HostDriver) -> None:
    exporter, pool = Exporter(driver), Pool(4, 4096)
    sink = CudaIpcSink(pool.buffer, driver)
    sink.connect(exporter.handle)
    sink.connect(exporter.handle)
    op = sink.read(exporter.handle, [0], [0])
    sink.disconnect(exporter.handle.agent)
    assert driver.mapped
    with pytest.raises(TransferError, match="not connected"):
        sink.read(exporter.handle, [1], [1])
    assert finish(op) is ReadState.DONE and not driver.mapped
    sink.connect(exporter.handle)
    sink.close()
    sink.close()
    assert not driver.mapped


def test_close_makes_every_read_final(driver: HostDriver) -> None:
    exporter, pool = Exporter(driver), Pool(4, 4096)
    sink = CudaIpcSink(pool.buffer, driver)
    sink.connect(exporter.handle)
    op = sink.read(exporter.handle, [7], [2])
    sink.close()
    assert np.array_equal(pool.pages[2], exporter.pages[7])
    assert op.poll() is ReadState.DONE and not driver.mapped and not driver.events


def test_lost_context_fails_the_read(driver: HostDriver) -> None:
    exporter, pool = Exporter(driver), Pool(4, 4096)
    sink = CudaIpcSink(pool.buffer, driver)
    sink.connect(exporter.handle)
    op = sink.read(exporter.handle, [0], [0])
    driver.lost = True
    assert op.poll() is ReadState.FAILED and "exporter1" in op.error and "700" in op.error
    with pytest.raises(TransferError, match="reading 1 pages of exporter1 failed"):
        sink.read(exporter.handle, [0], [0])


def test_who_cannot_be_mapped_is_refused(driver: HostDriver) -> None:
    exporter, sink = Exporter(driver), CudaIpcSink(Pool(4, 4096).buffer, driver)
    elsewhere = msgspec.msgpack.encode(SharedMemory("another host", b"x" * 8, 0))
    for shared in (b"", elsewhere):
        with pytest.raises(TransferError, match="does not share its memory with this host"):
            sink.connect(msgspec.structs.replace(exporter.handle, shared=shared))
    driver.mapped[
        int.from_bytes(msgspec.msgpack.decode(exporter.handle.shared, type=SharedMemory).handle, "little")
    ] = 1
    with pytest.raises(TransferError, match="the memory of exporter1 cannot be mapped: already mapped"):
        sink.connect(exporter.handle)
    with pytest.raises(TransferError, match="ours have 2048"):
        CudaIpcSink(Pool(4, 2048).buffer, driver).connect(exporter.handle)


class Recorder(KvSink):
    """The last resort: takes everybody."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def connect(self, source: MemoryHandle) -> None:
        self.calls.append(f"connect {source.agent}")

    def read(self, source: MemoryHandle, src_pages: object, dst_pages: object) -> ReadOp:
        self.calls.append(f"read {source.agent}")
        raise TransferError("recorded")

    def disconnect(self, agent: str) -> None:
        self.calls.append(f"disconnect {agent}")

    def close(self) -> None:
        self.calls.append("close")


def test_nearest_way_to_each_exporter(driver: HostDriver) -> None:
    here, pool, far = Exporter(driver, 1), Pool(4, 4096), Recorder()
    there = msgspec.structs.replace(Exporter(driver, 2).handle, shared=b"")
    sink = NearestSink(CudaIpcSink(pool.buffer, driver), far)
    for handle in (here.handle, there, here.handle, there):
        sink.connect(handle)
    assert finish(sink.read(here.handle, [1], [1])) is ReadState.DONE
    with pytest.raises(TransferError, match="recorded"):
        sink.read(there, [1], [1])
    sink.disconnect(here.handle.agent)
    sink.disconnect(there.agent)
    with pytest.raises(TransferError, match="not connected"):
        sink.read(here.handle, [1], [1])
    sink.close()
    agent = there.agent
    assert far.calls == [f"connect {agent}", f"connect {agent}", f"read {agent}", f"disconnect {agent}", "close"]
    assert not driver.mapped


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_runs_are_the_pairs_again(pairs: list[tuple[int, int]]) -> None:
    src, dst = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    found = list(runs(src, dst))
    assert [(s + i, d + i) for s, d, count in found for i in range(count)] == pairs
    for (s, d, count), (next_s, next_d, _) in itertools.pairwise(found):
        assert (s + count, d + count) != (next_s, next_d)


def _export_from_gpu(pipe: Connection) -> None:
    pages = torch.arange(16 * 4096, dtype=torch.int32, device="cuda").to(torch.uint8).view(16, 4096)
    torch.cuda.synchronize()
    buffer = PageBuffer(pages.data_ptr(), 4096, 16, "VRAM", 0)
    pipe.send(MemoryHandle("nixl", "gpu", b"", buffer.address, 4096, 16, 0, "VRAM", shared_memory_name(buffer)))
    pipe.recv()


@pytest.mark.gpu
@needs_gpu
def test_two_processes_on_one_gpu() -> None:
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_export_from_gpu, args=(theirs,), daemon=True)
    process.start()
    handle: MemoryHandle = pipe.recv()
    assert msgspec.msgpack.decode(handle.shared, type=SharedMemory).host == host_id()
    pages = torch.zeros(8, 4096, dtype=torch.uint8, device="cuda")
    sink = CudaIpcSink(PageBuffer(pages.data_ptr(), 4096, 8, "VRAM", 0))
    sink.connect(handle)
    assert finish(sink.read(handle, [4, 5, 11], [0, 1, 7])) is ReadState.DONE
    expected = torch.arange(16 * 4096, dtype=torch.int32).to(torch.uint8).view(16, 4096)
    assert torch.equal(pages.cpu()[[0, 1, 7]], expected[[4, 5, 11]]) and not pages[2:7].any()
    sink.close()
    pipe.send("end")
    process.join(30)
