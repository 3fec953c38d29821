"""The agreement of replicas, once per step: every replica brings a vector of integers and gets those of all.

The first leader of each host, its node leader, collects the vectors of the host's replicas, its members. Node leaders
send each other those of their hosts, and their members those of all. A leader that sleeps is woken by its connections,
so that an idle worker does nothing at all.

A node leader that waits in vain tells the others why, so all errors name the rank that is missing.
"""

import contextlib
import select
import struct
from collections.abc import Sequence
from typing import NamedTuple

from millrace_serve.engine.lockstep.links import RankConnection, RankLost


class ReplicaState(NamedTuple):
    """What a replica says in a step. Every field is an integer of 64 bits; all are 0 when it has nothing to say."""

    num_decode: int = 0  # sequences
    num_sampling: int = 0  # chunks that sample
    chunk_tokens: int = 0  # of the chunks that it computes alone
    last: int = 0  # whether it wants to end
    wants_turn: int = 0  # Plan.wants_turn
    shared_start: int = 0  # its shared chunk; both 0: it has none
    shared_end: int = 0
    limit_us: int = 0  # Plan.limit_s; 0: none, and spare_us means nothing
    spare_us: int = 0  # Plan.spare_s
    awaited: int = 0  # Plan.awaited
    keys: int = 0  # Work.keys
    pairs: int = 0  # Work.pairs


Said = tuple[int, ...]  # a State as the plain tuple of its fields: 72 of them are made in every step

VECTOR = struct.Struct(f"={len(ReplicaState._fields)}q")
HEADER = struct.Struct("=qq")  # number of the step, bytes of text behind the vectors that says which rank was lost


class Replicas:
    """The place of one leader in the agreement."""

    def __init__(
        self, rank: int, leaders: Sequence[int], links: Sequence[RankConnection], beside: dict[int, list[int]]
    ) -> None:
        """
        Args:
            rank: of this leader.
            leaders: of all replicas.
            links: of a member to its node leader; of a node leader to its members and the other node leaders.
            beside: node leader -> the replicas of its host.
        """
        self.index = leaders.index(rank)
        self._links, self._is_node_leader = links, rank in beside
        self._members = [link for link in links if link.rank not in beside]
        self._node_leaders = [link for link in links if link.rank in beside]
        placed = [index for block in beside.values() for index in block]  # a host's vectors stand together
        self._places = [placed.index(index) for index in range(len(leaders))]
        self._step, self._table = 0, memoryview(bytearray(len(leaders) * VECTOR.size))
        # parts of the table: what this leader tells node leaders, and what it hears over each link
        self._own = self._part(beside.get(rank, [self.index]))
        self._heard = {link.rank: self._part([leaders.index(link.rank)]) for link in self._members}
        for link in self._node_leaders:
            self._heard[link.rank] = self._part(beside[link.rank]) if self._is_node_leader else self._table
        self._poll = select.poll()
        for link in links:
            self._poll.register(link, select.POLLIN)
        self.fds = [link.fileno() for link in links]  # one of them becomes readable when another replica calls

    def called(self) -> bool:
        """Whether another replica waits in the next step. If not, a call from now on makes one of `fds` readable."""
        return bool(self._poll.poll(0))

    def all_gather(self, mine: ReplicaState, *, ring: bool) -> list[Said]:
        """Vectors in the order of replicas. `ring`: they slept, so node leaders call. Raises RankLost."""
        try:
            self._bring(mine, ring)
            return self._learn(ring)
        except RankLost as error:
            self._lose(str(error))
            raise

    def _bring(self, mine: ReplicaState, ring: bool) -> None:
        """Tell the node leaders this replica's vector, or those of the host."""
        self._step += 1
        VECTOR.pack_into(self._table, self._places[self.index] * VECTOR.size, *mine)
        if ring:
            self._tell(self._members, self._table)  # a message at all wakes them
        self._hear_all(self._members)
        self._tell(self._node_leaders, self._own)

    def _learn(self, ring: bool) -> list[Said]:
        """Hear from the node leaders, and tell the members."""
        if ring and not self._is_node_leader:
            self._hear(self._node_leaders[0])  # the call
        self._hear_all(self._node_leaders)
        self._tell(self._members, self._table)
        said = list(VECTOR.iter_unpack(self._table))
        return [said[place] for place in self._places]

    def _tell(self, links: Sequence[RankConnection], part: memoryview) -> None:
        """One that has ended is found where it is heard: it may have said why."""
        message = HEADER.pack(self._step, 0) + part
        for link in links:
            with contextlib.suppress(RankLost):
                link.send(message)

    def _hear_all(self, links: Sequence[RankConnection]) -> None:
        """In any order: one that has ended is found while another is late."""
        waiting, poll = {link.fileno(): link for link in links}, select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        while waiting:
            for fd, _ in poll.poll():
                poll.unregister(fd)
                self._hear(waiting.pop(fd))

    def _hear(self, link: RankConnection) -> None:
        part = self._heard[link.rank]
        received = link.receive(HEADER.size + len(part))
        step, lost = HEADER.unpack_from(received)
        if lost:
            raise RankLost(link.receive(lost).decode())
        if step != self._step:
            raise RankLost(f"rank {link.rank} is at step {step}, not {self._step}")
        part[:] = received[HEADER.size :]

    def _lose(self, why: str) -> None:
        text = why.encode()
        for link in self._links:
            nothing = bytes(len(self._table if link in self._members else self._own))
            with contextlib.suppress(RankLost):
                link.send(HEADER.pack(self._step, len(text)) + nothing + text)

    def _part(self, block: Sequence[int]) -> memoryview:
        """Of the replicas of `block`, which stand together."""
        first = self._places[block[0]]
        return self._table[first * VECTOR.size : (first + len(block)) * VECTOR.size]
