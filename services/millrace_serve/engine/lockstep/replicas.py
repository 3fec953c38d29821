"""The agreement of replicas, once per step: every replica brings a vector of integers and gets those of all.

Leaders of replicas write their vectors into the memory of their host, and the first leader of each host, its node
leader, collects them. Node leaders send each other those of their hosts, and publish all. A leader that sleeps is woken
by its wake-up pipe (within a host) or by the node leader's connections, so that an idle worker does nothing at all.

A node leader that waits in vain tells the others why, so all errors name the rank that is missing.
"""

from __future__ import annotations

import contextlib
import select
import struct
from collections.abc import Sequence
from typing import NamedTuple

from millrace_serve.engine.lockstep.host import POSTED, PUBLISHED, Host
from millrace_serve.engine.lockstep.links import RankConnection
from millrace_serve.engine.lockstep.shared_memory import RankLost


class ReplicaState(NamedTuple):
    """What a replica says in a step. Every field is an integer of 64 bits; all are 0 when it has nothing to say."""

    num_decode: int = 0  # sequences
    num_sampling: int = 0  # chunks that sample
    chunk_tokens: int = 0  # of the chunks that it computes alone
    last: int = 0  # whether it wants to end
    wants_turn: int = 0  # Plan.wants_turn
    shared_start: int = 0  # its shared chunk; both 0: it has none
    shared_end: int = 0


Said = tuple[int, ...]  # a State as the plain tuple of its fields: 72 of them are made in every step

VECTOR = struct.Struct(f"={len(ReplicaState._fields)}q")
HEADER = struct.Struct("=qq")  # number of the step, bytes of text behind the vectors that says which rank was lost


class Replicas:
    """The place of one leader in the agreement."""

    def __init__(
        self, host: Host, leaders: Sequence[int], links: Sequence[RankConnection], beside: dict[int, list[int]]
    ) -> None:
        """
        Args:
            leaders: of all replicas.
            links: of a node leader to the others.
            beside: node leader -> the replicas of its host.
        """
        self._host, self._links = host, links
        self.index = leaders.index(host.rank)
        self._node_leader, own = next(block for block in beside.items() if self.index in block[1])
        self._posted = {leaders[index]: host.counter(leaders[index], POSTED) for index in own}
        self._published = host.counter(self._node_leader, PUBLISHED)
        placed = [index for block in beside.values() for index in block]  # a host's vectors stand together
        self._places = [placed.index(index) for index in range(len(leaders))]
        self._blocks: dict[int, slice] = {}
        for node_leader, block in beside.items():
            first = placed.index(block[0])
            self._blocks[node_leader] = slice(first * VECTOR.size, (first + len(block)) * VECTOR.size)
        self._look = host.look(self._missing)
        self._look_for_node_leader = host.look(lambda: self._missing() or (self._node_leader,))
        self._poll = select.poll()
        for link in links:
            self._poll.register(link, select.POLLIN)
        self._step, self._table = 0, host.table(0)
        # one of them becomes readable when another replica calls
        self.fds: Sequence[int] = [host.wakeup_pipes[host.rank].fd, *(link.fileno() for link in links)]

    def called(self) -> bool:
        """Whether another replica waits in the next step. If not, a call from now on makes one of `fds` readable."""
        self._host.wakeup_pipes[self._host.rank].silence()
        if any(counter.has(self._step + 1) for counter in self._posted.values()):
            return True
        return bool(self._links and self._poll.poll(0))

    def all_gather(self, mine: ReplicaState, *, ring: bool) -> list[Said]:
        """Vectors in the order of replicas. `ring`: the others may sleep. Raises RankLost."""
        self._post(mine)
        if ring:
            for rank in self._missing():
                self._host.wakeup_pipes[rank].ring()
        try:
            if self._host.rank == self._node_leader:
                self._collect()
                self._send()
                self._receive()
                self._published.raise_to(self._step)
            else:
                self._published.wait(self._step, self._look_for_node_leader)
        except RankLost as error:
            self._tell(str(error))
            raise
        return self._read()

    def _post(self, mine: ReplicaState) -> None:
        self._step += 1
        self._table = self._host.table(self._step)
        VECTOR.pack_into(self._table, self._places[self.index] * VECTOR.size, *mine)
        self._posted[self._host.rank].raise_to(self._step)

    def _read(self) -> list[Said]:
        said = list(VECTOR.iter_unpack(self._table))
        return [said[place] for place in self._places]

    def _collect(self) -> None:
        for counter in self._posted.values():
            counter.wait(self._step, self._look)

    def _send(self) -> None:
        if self._links:
            message = HEADER.pack(self._step, 0) + self._table[self._blocks[self._node_leader]]
            for link in self._links:
                link.send(message)

    def _receive(self) -> None:
        for link in self._links:
            block = self._table[self._blocks[link.rank]]
            received = link.receive(HEADER.size + len(block))
            step, lost = HEADER.unpack_from(received)
            if lost:
                raise RankLost(link.receive(lost).decode())
            if step != self._step:
                raise RankLost(f"rank {link.rank} is at step {step}, not {self._step}")
            block[:] = memoryview(received)[HEADER.size :]

    def _missing(self) -> list[int]:
        """Leaders of this host that have not come to this step."""
        return [rank for rank, counter in self._posted.items() if not counter.has(self._step)]

    def _tell(self, why: str) -> None:
        self._host.lose(why)
        self._published.wake()
        text = why.encode()
        nothing = bytes(len(self._table[self._blocks[self._node_leader]]))
        for link in self._links:
            with contextlib.suppress(RankLost):
                link.send(HEADER.pack(self._step, len(text)) + nothing + text)
