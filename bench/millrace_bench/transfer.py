"""NIXL READ between two processes of this machine: GB/s by page size and pages per read, and the least a read costs.

The exporting process owns one pool, this process another; page lists are random on both sides. Each row is compared
with copying the same pages inside this process (ctypes.memmove, or on a GPU copies that do not wait for one another,
one call per page), measured in the same run.

millrace bench transfer                              host memory
millrace bench transfer --devices cuda:0 cuda:1      from the first GPU to the second
"""

import ctypes
import multiprocessing as mp
import queue
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq
from millrace_load.options import CommandLine, device, matching
from millrace_load.record import Record, print_record, print_row, printed
from millrace_serve.engine.core import RequestId
from millrace_serve.transfer.base import KvSink, MemoryHandle, PageBuffer, ReadState
from millrace_serve.transfer.messages import AddSource, FromReader, ReadDone, ReadPages, StopReader, ToReader
from millrace_serve.transfer.nixl import NixlSink, NixlSource
from millrace_serve.transfer.reader import Reader
from millrace_serve.worker.channels import Receiver, Sender

V3_PAGE_BYTES = 61 * 64 * 576 * 2  # layers x tokens x (latent 512 + rope 64) x bf16
SMALL_PAGE_BYTES = 4096
Memory = Any  # uint8 [pages, page_bytes]: a numpy array, or a tensor on a GPU


@dataclass(frozen=True)
class Settings:
    pages_per_read: Sequence[int] = (1, 4, 16, 64)
    repeats: int = 20  # reads per row at V3's page size; ten times that, small
    ucx: dict[str, str] = field(default_factory=lambda: {"NET_DEVICES": "lo"})
    devices: tuple[str, str] = ("cpu", "cpu")  # of the exporter's pool and of ours


@dataclass(frozen=True)
class Row:
    page_bytes: int
    pages: int  # per read
    read_us: float  # median, from make to final
    read_p99_us: float
    gb_per_s: float  # of the median
    memcpy_gb_per_s: float


@dataclass(frozen=True)
class Result:
    backend_ms: float  # creating our agent and registering our pool
    connect_ms: float  # loading the peer and preparing its descriptors
    first_read_ms: float  # the pair's first read: one small page, connection set-up included
    overhead_ms: float  # one small page, warm
    reader_overhead_ms: float  # the same through the reader thread, from command to event
    rows: list[Row]

    @property
    def v3_gb_per_s(self) -> float:
        return max(row.gb_per_s for row in self.rows if row.page_bytes == V3_PAGE_BYTES)


def run(settings: Settings) -> Result:
    """Measures; prints nothing. Needs 2 x max(pages_per_read) V3 pages of memory (4.5 MB each)."""
    small = _measure(SMALL_PAGE_BYTES, settings, settings.repeats * 10)
    return replace(small, rows=small.rows + _measure(V3_PAGE_BYTES, settings, settings.repeats).rows)


def _measure(page_bytes: int, settings: Settings, repeats: int) -> Result:
    num_pages, (theirs_on, ours_on) = max(settings.pages_per_read), settings.devices
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    exporter = context.Process(
        target=_export, args=(theirs, num_pages, page_bytes, theirs_on, settings.ucx), daemon=True
    )
    exporter.start()
    source: MemoryHandle = pipe.recv()
    memory, pool = _pool(num_pages, page_bytes, ours_on, fill=0)
    started = time.perf_counter()
    sink = NixlSink(pool, settings.ucx)
    backend_ms = _ms_since(started)
    try:
        started = time.perf_counter()
        sink.connect(source)
        connect_ms = _ms_since(started)
        first_read_ms = _read(sink, source, [0], [0]) * 1e3
        rng = np.random.default_rng(0)
        _read(sink, source, list(range(num_pages)), list(range(num_pages)))
        assert (memory == 1).all(), "the pages that arrived are not the exporter's"
        rows = [_row(sink, source, memory, pool, count, repeats, rng) for count in settings.pages_per_read]
        reader_ms = _reader_ms(sink, source, repeats)
        return Result(backend_ms, connect_ms, first_read_ms, rows[0].read_us / 1e3, reader_ms, rows)
    finally:
        sink.close()
        pipe.send("close")
        exporter.join()


def _row(
    sink: KvSink,
    source: MemoryHandle,
    memory: Memory,
    pool: PageBuffer,
    count: int,
    repeats: int,
    rng: np.random.Generator,
) -> Row:
    twin = memory.copy() if isinstance(memory, np.ndarray) else memory.clone()
    reads, copies = [], []
    for _ in range(repeats):
        src, dst = (rng.permutation(pool.num_pages)[:count].tolist() for _ in range(2))
        reads.append(_read(sink, source, src, dst))
        copies.append(_copy(twin, memory, src, dst))
    read_s, total = statistics.median(reads), count * pool.page_bytes
    return Row(
        page_bytes=pool.page_bytes,
        pages=count,
        read_us=read_s * 1e6,
        read_p99_us=float(np.percentile(reads, 99)) * 1e6,
        gb_per_s=total / read_s / 1e9,
        memcpy_gb_per_s=total / statistics.median(copies) / 1e9,
    )


def _read(sink: KvSink, source: MemoryHandle, src: Sequence[int], dst: Sequence[int]) -> float:
    started = time.perf_counter()
    op = sink.read(source, src, dst)
    while (state := op.poll()) is ReadState.PENDING:
        pass
    seconds = time.perf_counter() - started
    if state is not ReadState.DONE:
        raise RuntimeError(f"a read failed: {op.error}")
    return seconds


def _reader_ms(sink: KvSink, source: MemoryHandle, repeats: int) -> float:
    """Median of one-page reads, one at a time, each asked of an idle reader over ZeroMQ. Closes the sink."""
    context: zmq.Context[Any] = zmq.Context()
    inbox: Receiver[ToReader] = Receiver(context, "inproc://reader", ToReader)
    commands: Sender[ToReader] = Sender(context, inbox.endpoint)
    reports: queue.SimpleQueue[FromReader] = queue.SimpleQueue()
    thread = threading.Thread(target=Reader(sink, inbox, reports.put, stall_s=60.0).run)
    thread.start()
    commands.send(AddSource(source))
    seconds = []
    for i in range(repeats):
        started = time.perf_counter()
        commands.send(ReadPages(RequestId(1, 0), i, [0], [0], source.agent))
        report = reports.get()
        seconds.append(time.perf_counter() - started)
        assert isinstance(report, ReadDone) and not report.error, report
    commands.send(StopReader())
    thread.join()
    context.destroy(linger=0)
    return statistics.median(seconds) * 1e3


def _copy(source: Memory, memory: Memory, src: Sequence[int], dst: Sequence[int]) -> float:
    started = time.perf_counter()
    if isinstance(memory, np.ndarray):
        size = memory.shape[1]
        for i, j in zip(src, dst, strict=True):
            ctypes.memmove(memory.ctypes.data + j * size, source.ctypes.data + i * size, size)
    else:
        for i, j in zip(src, dst, strict=True):
            memory[j].copy_(source[i])
        _synchronize(memory)
    return time.perf_counter() - started


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3


def _pool(num_pages: int, page_bytes: int, device: str, fill: int) -> tuple[Memory, PageBuffer]:
    if device == "cpu":
        host = np.full((num_pages, page_bytes), fill, dtype=np.uint8)  # touched, so no page fault is measured
        return host, PageBuffer(host.ctypes.data, page_bytes, num_pages)
    import torch  # a second, which host memory need not spend

    memory = torch.full((num_pages, page_bytes), fill, dtype=torch.uint8, device=device)
    _synchronize(memory)
    return memory, PageBuffer(memory.data_ptr(), page_bytes, num_pages, "VRAM", memory.device.index)


def _synchronize(memory: Memory) -> None:
    import torch

    torch.cuda.synchronize(memory.device)


def _export(pipe: Connection, num_pages: int, page_bytes: int, device: str, ucx: dict[str, str]) -> None:
    memory, pool = _pool(num_pages, page_bytes, device, fill=1)
    source = NixlSource(pool, ucx)
    pipe.send(source.handle())
    pipe.recv()
    source.close()
    del memory


UCX = "KEY=VALUE[,KEY=VALUE...]"


def main() -> None:
    parser = CommandLine("millrace bench transfer", __doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pages-per-read", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument(
        "--repeats", type=int, default=20, help="reads per row at V3's page size; ten times that, small"
    )
    parser.add_argument("--ucx", type=matching(r"(\w+=[^,]*(,|$))*", UCX), default="NET_DEVICES=lo", metavar=UCX)
    parser.add_argument("--devices", nargs=2, type=device, default=("cpu", "cpu"), help="cpu or cuda:N")
    args = parser.parse_args()
    ucx = dict(setting.split("=", 1) for setting in args.ucx.split(",") if setting)
    settings = Settings(args.pages_per_read, args.repeats, ucx, tuple(args.devices))
    result = run(settings)
    results = asdict(result) | {"v3_gb_per_s": result.v3_gb_per_s}
    printed(results["rows"])
    print_row(**{name: value for name, value in results.items() if name != "rows"})
    print_record(Record("transfer", asdict(settings), results))


if __name__ == "__main__":
    main()
