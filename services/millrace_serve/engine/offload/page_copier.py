"""Moves pages between a pool and its host tier beside the steps. host_copies.py decides which.

This is the copier of a pool in the host's own memory (a CPU, the simulated engine); cuda_copier.py is that of a
GPU.
"""

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from millrace_serve.engine.cache.kv_pool import KvPool, PoolMemory
from millrace_serve.engine.offload.host_tier import Copy
from millrace_serve.transfer.base import PageBuffer

# Of one store: more than 2048 prompt tokens of the 671B model (138 MiB), so that one store per step keeps up.
# The bus bounds what a copy takes from the steps beside it: PCIe 5 has 64 GB/s, an H200's memory 4.8 TB/s.
STORE_BYTES = 192 << 20
WAYS = 2  # of a copy: from the host, to the host

Mark = Any  # of the end of a copy: a copier's own


class PageMoves(msgspec.Struct, frozen=True, array_like=True):
    """pages[i] to or from the host's slots[i]"""

    to_host: bool
    pages: list[int]
    slots: list[int]


@dataclass(slots=True, eq=False)
class CopyJob:
    """pages[i] to or from the host's slot of copies[i]."""

    to_host: bool
    pages: list[int]
    copies: list[Copy]
    done: Callable[[], None]  # what follows when the bytes are there, on every rank of the replica

    @property
    def moves(self) -> PageMoves:
        return PageMoves(self.to_host, self.pages, [copy.slot for copy in self.copies])


class SharedStore:
    """The memory of a host tier that several ranks share: one block for a replica, mapped by each of its ranks.

    The leader makes the block without a name. The others open it by the leader's process. So nothing is left of it when
    the ranks have ended, however they ended.
    """

    def __init__(self, fd: int, rank: int, ranks: int, page_bytes: int) -> None:
        self.rank, self.ranks = rank, ranks  # of the replica; rank 0 is its leader
        self.memory = np.frombuffer(mmap.mmap(fd, 0), np.uint8)  # [bytes of everything]
        # int64 [ranks, WAYS], copies that each rank but the leader has carried out; alone in the first page
        self.ended = self.memory[: mmap.PAGESIZE].view(np.int64)[: ranks * WAYS].reshape(ranks, WAYS)
        self.slots = self.memory[mmap.PAGESIZE :].reshape(-1, page_bytes)  # [num_slots, page_bytes]

    def part(self, count: int) -> slice:
        """The share of this rank in `count` pages that go to the host. Neighbours stay together."""
        return slice(count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks)


class PageCopier:
    """Jobs in flight and their totals. Not thread-safe."""

    def __init__(self, pool: KvPool, num_slots: int, shared: SharedStore | None = None) -> None:
        """`num_slots`: of the host tier; 0: there is none, and `start` is never called. `shared`: memory of the slots,
        where a replica has several ranks.
        """
        self.num_slots = num_slots
        self.most_pages = max(STORE_BYTES // pool.layout.page_bytes, 1)  # of a store
        self._page_bytes = pool.layout.page_bytes
        self._pool = pool.rows
        self._shared = shared
        self._host: PoolMemory = np.empty((num_slots, self._page_bytes), np.uint8) if shared is None else shared.slots
        self._in_flight: list[tuple[CopyJob, int, Mark]] = []
        self._started = {True: 0, False: 0}  # by whether they go to the host
        names = [f"host_{what}/{way}" for what in ("bytes", "seconds") for way in ("store", "load")]
        # of Load: bytes copied to the host tier and back, and the time that it took on this rank
        self.counters: dict[str, float] = dict.fromkeys(names if num_slots else (), 0)

    @property
    def address(self) -> int:
        """Of slot 0, behind which the others follow."""
        return int(self._host.ctypes.data)

    @property
    def memory(self) -> PageBuffer:
        """The slots, for the disk tier."""
        return PageBuffer(self.address, self._page_bytes, self.num_slots)

    @property
    def busy(self) -> bool:
        return bool(self._in_flight)

    def start(self, job: CopyJob) -> None:
        """Of a leader."""
        self._started[job.to_host] += 1
        self._in_flight.append((job, self._started[job.to_host], self._copy(job.moves)))

    def follow(self, *started: PageMoves) -> None:
        """Of another rank: carry out what its leader has started, and let the leader know of the end of each."""
        for moves in started:
            self._copy(moves)
            self._tell(moves.to_host)

    def poll(self) -> list[CopyJob]:
        """The jobs that have ended since the last call, on all ranks."""
        if not self._in_flight:
            return []
        elsewhere = self._started if self._shared is None else self._shared.ended[1:].min(axis=0).tolist()
        ended = [
            (job, seconds)
            for job, number, mark in self._in_flight
            if number <= elsewhere[job.to_host] and (seconds := self._ended(mark)) is not None
        ]
        for job, seconds in ended:
            way = "store" if job.to_host else "load"
            self.counters[f"host_bytes/{way}"] += len(job.pages) * self._page_bytes
            self.counters[f"host_seconds/{way}"] += seconds
        jobs = [job for job, _ in ended]
        self._in_flight = [entry for entry in self._in_flight if entry[0] not in jobs]
        return jobs

    def close(self) -> None:
        """Jobs in flight may be dropped, but nothing moves any more."""

    def _part(self, moves: PageMoves) -> tuple[list[int], list[int]]:
        """The pages and slots of which this rank copies the bytes."""
        if self._shared is None or not moves.to_host:
            return moves.pages, moves.slots
        part = self._shared.part(len(moves.pages))
        return moves.pages[part], moves.slots[part]

    def _copy(self, moves: PageMoves) -> Mark:
        """Begin, and return a mark of the end for `_ended`. Here: the seconds that it took."""
        start = time.perf_counter()
        pages, slots = self._part(moves)
        if moves.to_host:
            self._host[slots] = self._pool[pages]
        else:
            self._pool[pages] = self._host[slots]
        return time.perf_counter() - start

    def _tell(self, to_host: bool) -> None:
        """Count a copy where the leader sees it, once its bytes are there."""
        assert self._shared is not None, "a rank that follows has a store in common with its leader"
        self._shared.ended[self._shared.rank, int(to_host)] += 1

    def _ended(self, mark: Mark) -> float | None:
        """Seconds that the copy took; None: it goes on."""
        return float(mark)


def share(rank: int, tp: int, exchange: Callable[[bytes], list[bytes]], num_slots: int, page_bytes: int) -> SharedStore:
    """Collective over all ranks of a worker. `exchange` gives each of them the bytes of all."""
    leader, fd = rank - rank % tp, -1
    if rank == leader:
        fd = os.memfd_create("millrace-host-tier")
        os.ftruncate(fd, mmap.PAGESIZE + num_slots * page_bytes)
    paths = exchange(f"/proc/{os.getpid()}/fd/{fd}".encode())
    if rank != leader:
        fd = os.open(paths[leader], os.O_RDWR)
    store = SharedStore(fd, rank - leader, tp, page_bytes)
    exchange(b"")  # all have mapped it
    os.close(fd)
    return store
