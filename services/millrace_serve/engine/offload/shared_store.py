"""The memory of a host tier that several ranks share: one block for a replica, mapped by each of its ranks.

The leader makes the block without a name. The others open it by the leader's process. So nothing is left of it when the
ranks have ended, however they ended.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np

WAYS = 2  # of a copy: from the host, to the host


class SharedStore:
    """
    Attributes:
        rank, ranks: of the replica; rank 0 is its leader
        memory: uint8 [bytes of everything]
        ended: int64 [ranks, WAYS], copies that each rank but the leader has carried out; alone in the first page
        slots: uint8 [num_slots, page_bytes]
    """

    def __init__(self, fd: int, rank: int, ranks: int, page_bytes: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.memory = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
        self.ended = self.memory[: mmap.PAGESIZE].view(np.int64)[: ranks * WAYS].reshape(ranks, WAYS)
        self.slots = self.memory[mmap.PAGESIZE :].reshape(-1, page_bytes)

    def ended_elsewhere(self) -> list[int]:
        """Copies of each way that all ranks but the leader have carried out."""
        least: list[int] = self.ended[1:].min(axis=0).tolist()
        return least

    def part(self, count: int) -> slice:
        """The share of this rank in `count` pages that go to the host. Neighbours stay together."""
        return slice(count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks)


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
