"""A rank finds the others at its start: which of them are on its host, and its connections to them.

Ranks are on one host when they have one network namespace and see each other's processes: two pods of one machine
usually do not. What ranks tell each other here goes through an `exchange` that the caller brings, which waits for the
slowest one to start.
"""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from millrace_serve.engine.lockstep.links import TOKEN_BYTES, Address, RankConnection, RankListener, connect
from millrace_serve.engine.lockstep.lockstep import Lockstep
from millrace_serve.engine.lockstep.replicas import Replicas
from millrace_serve.model.parallel import BOOT_ID

NAMESPACES = Path("/proc/self/ns/net"), Path("/proc/self/ns/pid")

Exchange = Callable[[bytes], list[bytes]]  # own bytes -> those of all ranks


class Card(msgspec.Struct):
    host: str
    local: Address  # for ranks of this host
    remote: Address
    token: bytes  # rank 0's counts


@dataclass(frozen=True, slots=True)
class Map:
    """Where all ranks are."""

    rank: int
    tp: int
    hosts: list[str]  # of each rank

    @property
    def leaders(self) -> list[int]:
        return list(range(0, len(self.hosts), self.tp))

    @property
    def leader(self) -> int:
        return self.rank - self.rank % self.tp

    @property
    def followers(self) -> range:
        """Of this rank's replica."""
        return range(self.leader + 1, self.leader + self.tp)

    @property
    def beside(self) -> dict[int, list[int]]:
        """node leader -> the replicas whose leaders are on its host."""
        by_host: dict[str, list[int]] = {}
        for leader in self.leaders:
            by_host.setdefault(self.hosts[leader], []).append(leader)
        return {leaders[0]: [leader // self.tp for leader in leaders] for leaders in by_host.values()}

    def is_local(self, rank: int) -> bool:
        return self.hosts[rank] == self.hosts[self.rank]

    @property
    def linked(self) -> list[int]:
        """Ranks to connect with: a follower with its leader; a leader with its followers and its node leader; a node
        leader with its members and the other node leaders.
        """
        if self.rank != self.leader:
            return [self.leader]
        node_leaders = list(self.beside)
        members = [leader for leader in self.leaders if self.is_local(leader) and leader not in node_leaders]
        if self.rank in node_leaders:
            return [rank for rank in (*node_leaders, *members, *self.followers) if rank != self.rank]
        return [*filter(self.is_local, node_leaders), *self.followers]


def join(rank: int, tp: int, dp: int, exchange: Exchange, address: str = "127.0.0.1", host: str = "") -> Lockstep:
    """Collective over all ranks.

    Args:
        address: at which ranks of other hosts reach this one.
        host: in the place of this host's own name, for tests.
    Raises:
        RankLost: another rank cannot be reached.
    """
    local, remote = RankListener(), RankListener(address)
    try:
        own = Card(host or own_host(), local.address, remote.address, secrets.token_bytes(TOKEN_BYTES))
        cards = [msgspec.msgpack.decode(card, type=Card) for card in exchange(msgspec.msgpack.encode(own))]
        token, place = cards[0].token, Map(rank, tp, [card.host for card in cards])
        links = []
        for other in place.linked:
            if other < rank:
                card = cards[other]
                links.append(connect(card.local if place.is_local(other) else card.remote, token, rank, other))
        higher = [other for other in place.linked if other > rank]
        links += local.accept(token, [other for other in higher if place.is_local(other)])
        links += remote.accept(token, [other for other in higher if not place.is_local(other)])
    finally:
        local.close()
        remote.close()
    return _lockstep(place, links)


def _lockstep(place: Map, links: list[RankConnection]) -> Lockstep:
    def close() -> None:
        for link in links:
            link.close()

    if place.rank != place.leader:
        return Lockstep(leader=links[0], close=close)
    followers = [link for link in links if link.rank in place.followers]
    leaders = [link for link in links if link not in followers]
    replicas = Replicas(place.rank, place.leaders, leaders, place.beside) if leaders else None
    return Lockstep(replicas, followers, close=close)


def own_host() -> str:
    """The same for processes that reach each other by Unix sockets without files and by /proc, and for no others."""
    return "-".join([BOOT_ID.read_text().strip(), *(str(os.stat(space).st_ino) for space in NAMESPACES)])
