"""The memory of a host tier that several ranks share: one block for a replica, mapped by each of its ranks.

The leader makes the block without a name. The others open it by the leader's process. So nothing is left of it when the
ranks have ended, however they ended.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")  # processes that have it in common see each other
WAYS = 2  # of a copy: from the host, to the host

Exchange = Callable[[bytes], list[bytes]]  # own bytes -> those of all ranks


class SharedStore:
    """
    Attributes:
        rank, ranks: of the replica; rank 0 is its leader
        memory: uint8 [bytes of everything]
        ended: int64 [ranks, WAYS], copies that each rank has carried out; the leader counts its own elsewhere
        slots: uint8 [num_slots, page_bytes]
    """

    def __init__(self, fd: int, rank: int, ranks: int, num_slots: int, page_bytes: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.memory = np.frombuffer(mmap.mmap(fd, _nbytes(num_slots, page_bytes)), np.uint8)
        self.ended = self.memory[: mmap.PAGESIZE].view(np.int64)[: ranks * WAYS].reshape(ranks, WAYS)
        self.slots = self.memory[mmap.PAGESIZE :].reshape(num_slots, page_bytes)

    def ended_elsewhere(self) -> list[int]:
        """Copies of each way that all ranks but the leader have carried out."""
        least: list[int] = self.ended[1:].min(axis=0).tolist()
        return least

    def part(self, count: int) -> slice:
        """The share of this rank in `count` pages that go to the host. Neighbours stay together."""
        return slice(count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks)


def share(rank: int, tp: int, exchange: Exchange, num_slots: int, page_bytes: int) -> SharedStore:
    """Collective over all ranks of a worker."""
    leader, fd = rank - rank % tp, -1
    if rank == leader:
        fd = os.memfd_create("millrace-host-tier")
        os.ftruncate(fd, _nbytes(num_slots, page_bytes))
    paths = exchange(f"/proc/{os.getpid()}/fd/{fd}".encode())
    if rank != leader:
        fd = os.open(paths[leader], os.O_RDWR)
    store = SharedStore(fd, rank - leader, tp, num_slots, page_bytes)
    exchange(b"")  # all have mapped it
    os.close(fd)
    return store


def own_host() -> str:
    """The same for ranks that can share a store, and for no others."""
    return f"{BOOT_ID.read_text().strip()}-{os.stat(PROCESSES).st_ino}"


def _nbytes(num_slots: int, page_bytes: int) -> int:
    """The counts have a page of the machine's own before the slots."""
    return mmap.PAGESIZE + num_slots * page_bytes
