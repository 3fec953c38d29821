"""Page pools with known contents, and exporters of them in this process and in another."""

import contextlib
import multiprocessing as mp
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from millrace_serve.transfer.base import KvSink, MemoryHandle, PageBuffer, ReadOp, ReadState
from millrace_serve.transfer.nixl import NixlSink, NixlSource
from millrace_testing import HANG_S
from millrace_testing.local_transfer import LocalFabric, LocalSink, LocalSource

POISON = 0xA5
LOOPBACK = {"NET_DEVICES": "lo"}
LOOPBACK_TCP = {"NET_DEVICES": "lo", "TLS": "tcp"}


class Pool:
    """A pool in this process: poisoned, or random bytes that only depend on the seed."""

    def __init__(self, num_pages: int, page_bytes: int, seed: int | None = None) -> None:
        if seed is None:
            self.pages = np.full((num_pages, page_bytes), POISON, dtype=np.uint8)
        else:
            words = np.random.default_rng(seed).integers(0, 1 << 63, (num_pages, page_bytes // 8))
            self.pages = words.view(np.uint8)
        self.buffer = PageBuffer(self.pages.ctypes.data, page_bytes, num_pages)


class LocalExporter:
    def __init__(self, fabric: LocalFabric, num_pages: int, page_bytes: int, seed: int) -> None:
        self.pool = Pool(num_pages, page_bytes, seed)
        self.pages = self.pool.pages
        self._source = LocalSource(fabric, self.pool.buffer)
        self.handle = self._source.handle()

    def kill(self) -> None:
        self._source.close()

    close = kill


class NixlExporter:
    """A process of its own; `pages` is our copy of what it exports."""

    def __init__(self, num_pages: int, page_bytes: int, seed: int, ucx: dict[str, str] = LOOPBACK) -> None:
        self.pages = Pool(num_pages, page_bytes, seed).pages
        mp.set_forkserver_preload(["millrace_serve.transfer.nixl"])  # imported once for all exporters
        context = mp.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_export, args=(theirs, num_pages, page_bytes, seed, ucx), daemon=True)
        self._process.start()
        assert self._pipe.poll(HANG_S), "the exporting process did not start"
        self.handle: MemoryHandle = self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        """Until every thread stands still: the signal reaches those that run a little later."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + HANG_S
        tasks = Path(f"/proc/{self.pid}/task")
        while {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()} != {"T"}:
            assert time.monotonic() < deadline, "the exporting process did not stop"

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send("close")
            self._process.join(2.0)
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid


def _export(pipe: Connection, num_pages: int, page_bytes: int, seed: int, ucx: dict[str, str]) -> None:
    pool = Pool(num_pages, page_bytes, seed)
    source = NixlSource(pool.buffer, ucx)
    pipe.send(source.handle())
    with contextlib.suppress(EOFError):  # the test ended without closing us
        pipe.recv()
    source.close()


class Fabric:
    """One transport: makes exporters and sinks that reach each other, and closes them."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.local = LocalFabric()
        self._to_close: list[KvSink | LocalExporter | NixlExporter] = []

    def exporter(self, num_pages: int = 16, page_bytes: int = 4096, seed: int = 1) -> LocalExporter | NixlExporter:
        if self.transport == "nixl":
            made = NixlExporter(num_pages, page_bytes, seed)
        else:
            made = LocalExporter(self.local, num_pages, page_bytes, seed)
        self._to_close.append(made)
        return made

    def linked(
        self, ours: int = 4, num_pages: int = 16, page_bytes: int = 4096
    ) -> tuple[LocalExporter | NixlExporter, Pool, KvSink]:
        """An exporter, a pool of `ours` pages, and a sink of the pool that is connected to the exporter."""
        exporter, pool = self.exporter(num_pages, page_bytes), Pool(ours, page_bytes)
        sink = self.sink(pool)
        sink.connect(exporter.handle)
        return exporter, pool, sink

    def sink(self, pool: Pool) -> KvSink:
        made = NixlSink(pool.buffer, LOOPBACK) if self.transport == "nixl" else LocalSink(self.local, pool.buffer)
        self._to_close.append(made)
        return made

    def close(self) -> None:
        for x in reversed(self._to_close):
            x.close()


def finish(op: ReadOp) -> ReadState:
    """Polls to the end."""
    deadline = time.monotonic() + HANG_S
    while (state := op.poll()) is ReadState.PENDING:
        assert time.monotonic() < deadline, "the read never became final"
    return state
