"""Moves pages between a pool and its host tier beside the steps. host_copies.py decides which.

This is the copier of a pool in the host's own memory (a CPU, the simulated engine); cuda_copier.py is that of a
GPU.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from millrace_serve.engine.cache.kv_pool import KvPool, PoolMemory
from millrace_serve.engine.offload.host_copies import CopyJob

# Of one store: more than 2048 prompt tokens of the 671B model (138 MiB), so that one store per step keeps up.
# The bus bounds what a copy takes from the steps beside it: PCIe 5 has 64 GB/s, an H200's memory 4.8 TB/s.
STORE_BYTES = 192 << 20


Mark = Any  # of the end of a copy: a copier's own


class PageCopier:
    """Jobs in flight and their totals. Not thread-safe."""

    def __init__(self, pool: KvPool, num_slots: int) -> None:
        """`num_slots`: of the host tier. 0: there is none, and `start` is never called."""
        self.num_slots = num_slots
        self.most_pages = max(STORE_BYTES // pool.layout.page_bytes, 1)  # of a store
        self._page_bytes = pool.layout.page_bytes
        self._pool = pool.rows
        self._host = self._allocate(num_slots)
        self._in_flight: list[tuple[CopyJob, Mark]] = []
        self._bytes = {True: 0, False: 0}  # by whether they went to the host
        self._seconds = {True: 0.0, False: 0.0}

    @property
    def address(self) -> int:
        """Of slot 0, behind which the others follow."""
        return int(self._host.ctypes.data)

    @property
    def busy(self) -> bool:
        return bool(self._in_flight)

    def start(self, job: CopyJob) -> None:
        self._in_flight.append((job, self._copy(job)))

    def poll(self) -> list[CopyJob]:
        """The jobs that have ended since the last call."""
        if not self._in_flight:
            return []
        ended = [(job, seconds) for job, mark in self._in_flight if (seconds := self._ended(mark)) is not None]
        for job, seconds in ended:
            self._bytes[job.to_host] += len(job.pages) * self._page_bytes
            self._seconds[job.to_host] += seconds
        jobs = [job for job, _ in ended]
        self._in_flight = [(job, mark) for job, mark in self._in_flight if job not in jobs]
        return jobs

    def counters(self) -> dict[str, float]:
        """Of Load: bytes copied to the host tier and back, and the time that it took."""
        if not self.num_slots:
            return {}
        return {
            "host_bytes/store": self._bytes[True],
            "host_bytes/load": self._bytes[False],
            "host_seconds/store": self._seconds[True],
            "host_seconds/load": self._seconds[False],
        }

    def close(self) -> None:
        """Jobs in flight may be dropped, but nothing moves any more."""

    def _allocate(self, num_slots: int) -> PoolMemory:
        """uint8 [num_slots, page_bytes]"""
        return np.empty((num_slots, self._page_bytes), np.uint8)

    def _copy(self, job: CopyJob) -> Mark:
        """Begin, and return a mark of the end for `_ended`. Here: the seconds that it took."""
        start, slots = time.perf_counter(), [copy.slot for copy in job.copies]
        if job.to_host:
            self._host[slots] = self._pool[job.pages]
        else:
            self._pool[job.pages] = self._host[slots]
        return time.perf_counter() - start

    def _ended(self, mark: Mark) -> float | None:
        """Seconds that the copy took; None: it goes on."""
        return float(mark)
