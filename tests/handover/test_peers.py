"""Connections to prefill workers: who is dropped, when, and who is not."""

from __future__ import annotations

import asyncio

import pytest
from millrace_rpc.errors import MillraceError
from millrace_rpc.server import Server
from millrace_serve.handover.peers import Peer, Peers


async def test_a_late_failure_of_a_dropped_peer_spares_its_successor() -> None:
    dropped: list[tuple[int, str]] = []
    peers = Peers(lambda rank, agent: dropped.append((rank, agent)))
    first = peers.get("127.0.0.1:1", "e")
    first.agents.add((0, "agent"))
    peers.drop(first)
    second = peers.get("127.0.0.1:1", "e")
    second.agents.add((0, "agent"))
    peers.drop(first)  # another import that it failed
    assert peers.get("127.0.0.1:1", "e") is second and dropped == [(0, "agent")]
    await peers.close()
    assert dropped == [(0, "agent")] * 2


async def test_a_peer_that_dies_while_nobody_imports_is_dropped() -> None:
    """Else its pool would stay mapped, and a successor on the same device would not find the memory."""
    dropped: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
    peers = Peers(lambda rank, agent: dropped.put_nowait((rank, agent)))
    server = Server([])
    peer = peers.get(f"127.0.0.1:{await server.start('127.0.0.1:0')}", "e")
    with pytest.raises(MillraceError):
        await peer.info()  # it has no such service; the connection is there
    peer.agents.add((3, "agent"))
    await server.stop(0)
    assert await asyncio.wait_for(dropped.get(), 30) == (3, "agent")
    assert peers.get(peer.address, "e") is not peer
    await peers.close()


async def test_a_watch_that_never_ends_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gRPC's now and then does not, after the peer was cut off for a while: the worker could not stop."""

    async def lost(peer: Peer) -> bool:
        await asyncio.Event().wait()
        return False

    monkeypatch.setattr(Peer, "lost", lost)
    peers = Peers(lambda rank, agent: None)
    for epoch in "ab":
        peers.get("127.0.0.1:1", epoch)
    await asyncio.wait_for(peers.close(), 20)
