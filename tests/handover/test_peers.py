"""Connections to prefill workers: who is dropped, when, and who is not."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
from millrace.v1 import worker_pb2, worker_pb2_grpc
from millrace_common.reasons import Reason
from millrace_common.versions import WORKER_API
from millrace_rpc.errors import MillraceError
from millrace_rpc.server import Server
from millrace_serve.engine.core import RequestId
from millrace_serve.handover.pairing import Pairs
from millrace_serve.handover.peers import Fetch, Peer, Peers
from millrace_serve.worker.config import WorkerConfig
from millrace_testing import HANG_S

Dropped = list[tuple[int, str]]  # ranks, and the agents that they forget


@pytest.fixture
def dropped() -> Dropped:
    return []


@pytest.fixture
async def peers(dropped: Dropped) -> AsyncIterator[Peers]:
    peers = Peers(lambda rank, agent: dropped.append((rank, agent)))
    yield peers
    await peers.close()


async def test_late_failure_of_a_dropped_peer_spares_its_successor(peers: Peers, dropped: Dropped) -> None:
    first = peers.get("127.0.0.1:1", "e")
    first.agents.add((0, "agent"))
    peers.drop(first)
    second = peers.get("127.0.0.1:1", "e")
    second.agents.add((0, "agent"))
    peers.drop(first)  # another import that it failed
    assert peers.get("127.0.0.1:1", "e") is second and dropped == [(0, "agent")]
    await peers.close()
    assert dropped == [(0, "agent")] * 2


async def test_worker_that_is_known_by_two_names_stays_connected_while_one_of_them_is(
    peers: Peers, dropped: Dropped
) -> None:
    """Routers may name it by its address and by a name; all reads over the other connection would fail."""
    first, second = peers.get("127.0.0.1:1", "e"), peers.get("localhost:1", "e")
    first.agents = second.agents = {(0, "agent")}
    peers.drop(first)
    assert not dropped
    peers.drop(second)
    assert dropped == [(0, "agent")]


CANCELLED, UNAUTHENTICATED = grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("code", "dropped", "reason"),
    [
        (CANCELLED, True, Reason.WORKER_LOST),
        (CANCELLED, False, Reason.CANCELLED),
        (UNAUTHENTICATED, False, Reason.TRANSFER_FAILED),
    ],
)
async def test_stream_that_breaks_has_a_reason_that_is_not_the_clients(
    code: grpc.StatusCode, dropped: bool, reason: Reason, peers: Peers
) -> None:
    """The watch of the connection may see its end first: CANCELLED would not be tried again. A secret that differs
    between workers is our fault.
    """
    broken = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="Locally cancelled")
    call = Mock(write=AsyncMock(), read=AsyncMock(side_effect=broken))
    peer = peers.get("127.0.0.1:1", "e")
    fetch = Fetch(call, peer, RequestId(1, 0), "", 1.0, None)
    if dropped:
        peers.drop(peer)
    with pytest.raises(MillraceError) as caught:
        async for _ in fetch.items():
            pass
    assert caught.value.reason is reason


async def test_stream_whose_channel_was_closed_before_it_began_ends(peers: Peers) -> None:
    """Its opening is never written for gRPC, and the request would wait for ever."""
    never = asyncio.Event().wait
    call = Mock(write=lambda message: never(), read=never)
    fetch = Fetch(call, peers.get("127.0.0.1:1", "e"), RequestId(1, 0), "", 0.01, None)
    with pytest.raises(MillraceError) as caught:
        async for _ in fetch.items():
            pass
    assert caught.value.reason is Reason.STALLED


async def test_a_peer_that_dies_while_nobody_imports_is_dropped() -> None:
    """Else its pool would stay mapped, and a successor on the same device would not find the memory."""
    async with reached() as (peers, peer, dropped, server, _):
        await server.stop(0)
        assert await dropped.get() == (3, "agent") and peers.get(peer.address, "e") is not peer


async def test_peer_that_is_silent_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace_serve.handover.peers.SILENCE_S", 0.1)
    async with reached() as (_, peer, dropped, *_):
        assert await dropped.get() == (3, "agent") and peer.dropped


async def test_peer_that_cannot_be_watched_is_dropped(peers: Peers) -> None:
    peer = peers.get("127.0.0.1:1", "e")
    peer.worker = Mock(WatchLoad=Mock(side_effect=KeyError))
    await asyncio.wait(peers._watches.values())
    assert peer.dropped


async def test_peer_that_has_forgotten_its_weights_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be asleep, and others wait for the memory of its GPUs, which stays taken while a page is mapped."""
    monkeypatch.setattr("millrace_serve.handover.peers.SILENCE_S", 3600.0)  # it is dropped for what it says
    async with reached() as (_, peer, dropped, _, loads):
        for _ in range(2):
            await loads.put("e")
            await loads.join()
            assert dropped.empty()
        await loads.put("another")  # whose stream is cancelled as soon as it arrives
        assert await dropped.get() == (3, "agent") and peer.dropped


async def test_answer_of_a_process_ends_the_peers_before_it_at_its_address(peers: Peers, dropped: Dropped) -> None:
    """Before it connects to the same agents; a wrong epoch that somebody asks for drops nobody."""
    old, other, new = (peers.get(f"127.0.0.1:{port}", epoch) for port, epoch in ((1, "old"), (2, "old"), (1, "new")))
    for peer in (old, other, new):
        peer.agents.add((0, f"{peer.address} {peer.epoch}"))
    assert not dropped
    peers.answered(new)
    assert dropped == [(0, "127.0.0.1:1 old")] and old.dropped and not other.dropped and not new.dropped


class Loads(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self) -> None:
        self.epochs: asyncio.Queue[str] = asyncio.Queue()  # of the snapshots to send

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.LoadSnapshot]:
        while True:
            epoch = await self.epochs.get()
            yield worker_pb2.LoadSnapshot(epoch=epoch)
            self.epochs.task_done()


@contextlib.asynccontextmanager
async def reached() -> AsyncIterator[tuple[Peers, Peer, asyncio.Queue[tuple[int, str]], Server, asyncio.Queue[str]]]:
    """A peer that has said its epoch, of what is dropped; and what `worker` has."""
    dropped: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
    peers = Peers(lambda rank, agent: dropped.put_nowait((rank, agent)))
    async with worker() as (server, loads, address):
        peer = peers.get(address, "e")
        peer.agents.add((3, "agent"))
        await loads.put("e")
        yield peers, peer, dropped, server, loads
        await peers.close()


@contextlib.asynccontextmanager
async def worker() -> AsyncIterator[tuple[Server, asyncio.Queue[str], str]]:
    """A server, the epochs that it is to say, and its address."""
    server, loads = Server([]), Loads()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(loads, server.grpc)
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    try:
        yield server, loads.epochs, address
    finally:
        await server.stop(0)


async def test_watch_that_never_ends_holds_up_nobody(monkeypatch: pytest.MonkeyPatch, peers: Peers) -> None:
    """As gRPC's now and then does not, after the peer was cut off for a while: the worker could not stop."""
    monkeypatch.setattr(Peer, "lost", lambda peer: asyncio.Event().wait())
    for epoch in "ab":
        peers.get("127.0.0.1:1", epoch)
    await asyncio.wait_for(peers.close(), HANG_S)


async def test_hundred_restarts_of_a_worker_leave_nothing() -> None:
    connected: set[tuple[int, str]] = set()
    peers = Peers(lambda rank, agent: connected.remove((rank, agent)))
    pairs = Pairs(WorkerConfig(engine="sim"), None, None, peers, None)  # type: ignore[arg-type]
    for start in range(100):
        peer = peers.get("127.0.0.1:1", f"epoch {start}")
        pairs._warmed = pairs.warmed | {peer.epoch}  # as after a warm-up
        for rank in range(2):
            agent = f"kv-{start}-{rank}"
            peer.agents.add((rank, agent))
            connected.add((rank, agent))
        assert pairs.warmed == peers.epochs == {peer.epoch}
        peers.drop(peer)
        await asyncio.sleep(0)
    assert peer.dropped and not connected
    assert not peers._peers and not peers._watches and not pairs.warmed
    await peers.close()
    assert not peers._closing


async def test_warm_up_of_a_pair_runs_every_pair_of_replicas(monkeypatch: pytest.MonkeyPatch, peers: Peers) -> None:
    info = worker_pb2.WorkerInfo(epoch="e", protocol=WORKER_API, layout={"fingerprint": "f"}, replicas=3)
    run = AsyncMock()  # (source, peer, theirs, ours, info)
    monkeypatch.setattr(Pairs, "_run", run)
    monkeypatch.setattr(Peer, "info", AsyncMock(return_value=info))
    ranks: Any = SimpleNamespace(ready_info=SimpleNamespace(layout=SimpleNamespace(fingerprint="f")))
    pairs = Pairs(WorkerConfig(engine="sim", dp=2), ranks, None, peers, None)  # type: ignore[arg-type]
    await pairs.warm_up(worker_pb2.KvSourceRef(address="127.0.0.1:1", epoch="e", fingerprint="f"))
    ran = sorted(call.args[2:4] for call in run.await_args_list)
    assert ran == [(theirs, ours) for theirs in range(3) for ours in range(2)] and pairs.warmed == {"e"}
    peers.drop(peers.get("127.0.0.1:1", "e"))
    assert not pairs.warmed


async def test_worker_that_cannot_be_asked_is_forgotten(peers: Peers) -> None:
    """The router tries a pair again and again, and each process start has another epoch."""
    pairs = Pairs(WorkerConfig(engine="sim"), None, None, peers, None)  # type: ignore[arg-type]
    with pytest.raises(MillraceError):
        await pairs.warm_up(worker_pb2.KvSourceRef(address="127.0.0.1:1", epoch="e"))
    while peers.epochs:  # until its watch is refused
        await asyncio.sleep(0.01)
