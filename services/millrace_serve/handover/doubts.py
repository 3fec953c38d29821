"""What failed reads say of this worker: it ends when its own transport is broken, so that a supervisor starts it anew.

A verdict (wedged.py) waits for CONFIRM_S, because the connections of sources that died break a little later than
reads from them. With one source only, each rank reads a page of its own pool: if that works, the source is the culprit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from millrace.v1 import kv_pb2

from millrace_serve.engine.core import RequestId
from millrace_serve.handover.peers import Peers
from millrace_serve.handover.wedged import Isolation, Verdict
from millrace_serve.transfer.messages import AddSource, DropSource, ReadPages
from millrace_serve.worker.frontend.ranks import Ranks

log = logging.getLogger(__name__)

CONFIRM_S = 2.0
CHECK = RequestId(0, 0)  # routers draw other rooms


class Doubts:
    """`leave(why)` ends the worker in good order."""

    def __init__(self, epoch: str, num_ranks: int, ranks: Ranks, peers: Peers, leave: Callable[[str], None]) -> None:
        self._epoch = epoch
        self._num_ranks = num_ranks
        self._ranks = ranks
        self._peers = peers
        self._leave = leave
        self._isolation = Isolation()
        self._timer: asyncio.TimerHandle | None = None
        self._checking: dict[int, str] = {}  # own agents by rank, while their pages are read
        self._checked = False  # our transport was in order after the last good read

    def report(self, agent: str) -> kv_pb2.ReadFailed:
        """What the source's worker is told."""
        return kv_pb2.ReadFailed(agent=agent, reader=self._epoch, checked=self._checked)

    def read_well(self) -> None:
        self._isolation.succeeded()
        self._checked = False

    def read_failed(self, epoch: str) -> None:
        """An import from the worker with this epoch failed because its pages could not be read."""
        verdict = self._isolation.failed(epoch, self._peers.epochs)
        if verdict is not Verdict.NOTHING and self._timer is None and not self._checked:
            self._timer = asyncio.get_running_loop().call_later(CONFIRM_S, self._judge)

    def on_check(self, rank: int, error: str) -> None:
        """A rank has read its own page, or could not."""
        if (agent := self._checking.pop(rank, None)) is None:
            return
        self._ranks.send_reader(rank, DropSource(agent))
        if error:
            self._leave(f"reads of KV pages fail, on rank {rank} even those of its own pool: {error}")
            return
        self._checked = not self._checking
        if self._checked:
            log.warning("this worker reads its own pages: the source is at fault")

    def forget(self) -> None:
        """The ranks end: what they could read says nothing about those that come, and checks of theirs never end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._isolation.succeeded()
        self._checking.clear()
        self._checked = False

    def _judge(self) -> None:
        self._timer = None
        sources = self._peers.epochs
        match self._isolation.verdict(sources):
            case Verdict.LEAVE:
                self._leave(f"reads of KV pages fail from all of {len(sources)} workers")
            case Verdict.CHECK if not self._checking:
                log.warning("reads of KV pages fail from the only source; each rank reads a page of its own pool")
                for rank in range(self._num_ranks):
                    memory = self._ranks.memory_of_rank(rank)
                    self._checking[rank] = memory.agent
                    self._ranks.send_reader(rank, AddSource(memory))
                    self._ranks.send_reader(rank, ReadPages(CHECK, 0, [0], [0], memory.agent))
