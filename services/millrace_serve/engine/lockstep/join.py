"""A rank finds the others at its start: which of them are on its host, their memory, their connections.

Ranks are on one host when they see one /dev/shm and each other's processes: two containers of one machine do not. What
ranks tell each other here goes through an `exchange` that the caller brings; all ranks of the worker come to it the
same number of times, and it waits for the slowest one to start.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from millrace_serve.engine.lockstep.followers import Inlet, LinkInlet, Outlet
from millrace_serve.engine.lockstep.host import Host
from millrace_serve.engine.lockstep.links import TOKEN_BYTES, RankConnection, RankListener, connect
from millrace_serve.engine.lockstep.lockstep import Lockstep
from millrace_serve.engine.lockstep.replicas import VECTOR, Replicas

MEMORY = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")

Exchange = Callable[[bytes], list[bytes]]  # own bytes -> those of all ranks


class Card(msgspec.Struct):
    host: str
    address: str
    port: int
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

    @property
    def local(self) -> list[int]:
        return [rank for rank in range(len(self.hosts)) if self.is_local(rank)]

    def is_local(self, rank: int) -> bool:
        return self.hosts[rank] == self.hosts[self.rank]

    @property
    def linked(self) -> list[int]:
        """Ranks to connect with: a node leader with the others, a leader with its followers on other hosts."""
        if self.rank != self.leader:
            return [] if self.is_local(self.leader) else [self.leader]
        node_leaders = [other for other in self.beside if other != self.rank] if self.rank in self.beside else []
        return node_leaders + [rank for rank in self.followers if not self.is_local(rank)]


def join(rank: int, tp: int, dp: int, exchange: Exchange, address: str = "127.0.0.1", host: str = "") -> Lockstep:
    """Collective over all ranks.

    Args:
        address: at which ranks of other hosts reach this one.
        host: in the place of this host's own name, for tests.
    Raises:
        RankLost: another rank cannot be reached.
        OSError: /dev/shm has no room.
    """
    listener = RankListener(address)
    try:
        own = Card(host or own_host(), address, listener.port, secrets.token_bytes(TOKEN_BYTES))
        cards = [msgspec.msgpack.decode(card, type=Card) for card in exchange(msgspec.msgpack.encode(own))]
        token, place = cards[0].token, Map(rank, tp, [card.host for card in cards])
        rings = [leader for leader in place.leaders if place.is_local(leader)] if tp > 1 else []
        name = MEMORY / f"millrace-{hashlib.sha256(token).hexdigest()[:16]}-{place.local[0]}"  # others may list it
        shared = Host(name, rank, place.local, dp * VECTOR.size, rings)
        exchange(b"")
        shared.open()
        links = [connect(cards[o].address, cards[o].port, token, rank, o) for o in place.linked if o < rank]
        links += listener.accept(token, [other for other in place.linked if other > rank])
    finally:
        listener.close()
    exchange(b"")
    shared.unlink()
    return _lockstep(place, shared, links)


def _lockstep(place: Map, shared: Host, links: list[RankConnection]) -> Lockstep:
    replicas = outlet = inlet = None
    if place.rank != place.leader:
        inlet = LinkInlet(links[0]) if links else Inlet(shared, place.leader)
    elif place.tp > 1:
        local = [rank for rank in place.followers if place.is_local(rank)]
        outlet = Outlet(shared, local, [link for link in links if link.rank in place.followers])
    if place.rank == place.leader and len(place.leaders) > 1:
        node_leaders = [link for link in links if link.rank in place.beside]
        replicas = Replicas(shared, place.leaders, node_leaders, place.beside)

    def close() -> None:
        shared.close()
        for link in links:
            link.close()

    return Lockstep(replicas, outlet, inlet, close)


def own_host() -> str:
    """The same for processes that see the same /dev/shm and each other, and for no others."""
    return f"{BOOT_ID.read_text().strip()}-{os.stat(MEMORY).st_dev}-{os.stat(PROCESSES).st_ino}"
