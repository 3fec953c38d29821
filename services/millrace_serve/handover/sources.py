"""The memory that readers of this worker get, and its renewal: a rank whose NIXL agent is wedged gets another one.

1. Readers report reads that failed. `Wedge` decides; the rank makes a new agent beside the old one.
2. New Fetch streams get the new agent's handle. Streams that have the old one go on with it: the pages are the same.
3. With the last of these streams the old agent goes. Reads that are left in flight then fail, as their streams did.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import Iterator

from millrace.v1 import kv_pb2

from millrace_serve.handover.wedged import Wedge
from millrace_serve.transfer.base import MemoryHandle
from millrace_serve.transfer.messages import CloseSource, RenewSource, SourceRenewed
from millrace_serve.worker.frontend.ranks import Ranks

log = logging.getLogger(__name__)


class Sources:
    def __init__(self, num_ranks: int, ranks: Ranks) -> None:
        clock = asyncio.get_running_loop().time
        self._ranks = ranks
        self._wedges = [Wedge(clock) for _ in range(num_ranks)]
        self._users: collections.Counter[str] = collections.Counter()  # open streams, by agent
        self._old: dict[str, int] = {}  # replaced agents that are still used: their ranks

    @contextlib.contextmanager
    def lent(self, replica: int) -> Iterator[list[MemoryHandle]]:
        """The handles of a replica's ranks, for one stream."""
        handles = self._ranks.memory_of(replica)
        self._users.update(handle.agent for handle in handles)
        try:
            yield handles
        finally:
            for handle in handles:
                self._users[handle.agent] -= 1
                self._close_if_unused(handle.agent)

    def on_failed(self, report: kv_pb2.ReadFailed) -> None:
        """A reader could not read. Reports about replaced agents come too late."""
        rank = self._ranks.rank_of(report.agent)
        if rank is not None and self._wedges[rank].reported(report.reader, report.checked):
            log.warning("rank %d: others cannot read its pages; it gets a new agent", rank)
            self._ranks.send_reader(rank, RenewSource())

    def on_renewed(self, rank: int, renewed: SourceRenewed) -> None:
        old = self._ranks.renew_memory(rank, renewed.memory)
        self._old[old] = rank
        self._close_if_unused(old)

    def _close_if_unused(self, agent: str) -> None:
        if self._users[agent] > 0:
            return
        del self._users[agent]
        if (rank := self._old.pop(agent, None)) is not None:
            self._ranks.send_reader(rank, CloseSource(agent))
