"""Connections to workers whose pages are read, one per process start of each: (address, epoch).

Each peer is watched. A peer whose watch ends, because the connection broke or was refused, it is silent, or it forgot
its weights, is dropped with its channel, and so is one of whose epoch nothing is left. The next import starts with a
fresh one; the ranks read nothing more from its pools and unmap them, because the memory of a dead process stays
allocated while another process maps it. Imports that use the peer at that time fail by their own broken streams. The
end of any other call says nothing of the peer: on one stream it can be gRPC's own, of a message that came too late.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TypeAlias, TypeVar

import grpc
from millrace.v1 import decode_pb2_grpc, kv_pb2, kv_pb2_grpc, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from millrace_common.reasons import Reason
from millrace_rpc.client import channel, heard_within, reply
from millrace_rpc.errors import MillraceError
from millrace_rpc.tls import Identity

from millrace_serve.engine.core import KvChunk, RequestId
from millrace_serve.transfer.base import MemoryHandle
from millrace_serve.worker.frontend import convert

log = logging.getLogger(__name__)

UNARY_TIMEOUT_S = 5.0
WATCH_MS = 1000  # between two signs of life
SILENCE_S = 5.0  # without any
LAST_CALLS_S = 300.0  # for the calls of a channel whose certificate was replaced: as long as a lease may be
T = TypeVar("T")
Call: TypeAlias = "grpc.aio.StreamStreamCall[kv_pb2.FetchRequest, kv_pb2.FetchResponse]"


class Peer:
    """One worker process."""

    def __init__(self, address: str, epoch: str, identity: Identity | None, token: str) -> None:
        self.address = address
        self.epoch = epoch
        self.agents: set[tuple[int, str]] = set()  # our ranks and the agents that they are connected to
        self.dropped = False
        self._identity = identity
        self._token = token
        self._connect()

    def _connect(self) -> None:
        self._version = self._identity.version if self._identity is not None else None
        self._channel = channel(self.address, self._identity, self._token)
        self._kv = kv_pb2_grpc.KvServiceStub(self._channel)
        self.worker = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(self._channel)
        self.decode = decode_pb2_grpc.DecodeServiceStub(self._channel)

    def fetch(self, id: RequestId, fingerprint: str, stall_s: float, prefix: kv_pb2.FetchPrefix | None) -> "Fetch":
        """Raises MillraceError."""
        return Fetch(_start(self._kv.Fetch), self, id, fingerprint, stall_s, prefix)

    async def info(self) -> worker_pb2.WorkerInfo:
        """Raises MillraceError."""
        return await reply(_start(lambda: self.worker.GetInfo(worker_pb2.GetInfoRequest(), timeout=UNARY_TIMEOUT_S)))

    async def close(self) -> None:
        await self._channel.close()

    async def lost(self) -> bool:
        """Wait until the connection breaks or is silent, or the process takes another epoch: it may sleep, and its
        pages be gone. False: this process closed or replaced the connection.
        """
        channel, request, met = self._channel, worker_pb2.WatchLoadRequest(min_interval_ms=WATCH_MS), False
        with contextlib.suppress(Exception):  # a peer that is not watched any more must not stay
            call = _start(lambda: self.worker.WatchLoad(request))
            while (load := await reply(heard_within(SILENCE_S, call.read()))) is not grpc.aio.EOF:
                if met and load.epoch != self.epoch:
                    break
                met = load.epoch == self.epoch
        return channel is self._channel

    def renewed(self) -> grpc.aio.Channel | None:
        """Use the newest certificate for further calls. Returns the previous channel if it changed."""
        if self._identity is None or self._identity.version == self._version:
            return None
        before = self._channel
        self._connect()
        return before


class Fetch:
    """One attempt's stream: iterate over `items`, and `release` once, which makes the stream end."""

    def __init__(
        self, call: Call, peer: Peer, id: RequestId, fingerprint: str, stall_s: float, prefix: kv_pb2.FetchPrefix | None
    ) -> None:
        self._call = call
        self._peer = peer
        self._id = id
        self._opening = kv_pb2.FetchOpen(
            id=convert.attempt_id(id), epoch=peer.epoch, fingerprint=fingerprint, prefix=prefix
        )
        self._stall_s = stall_s
        self._writing = asyncio.Lock()  # gRPC takes one message at a time

    async def items(self) -> AsyncGenerator[list[MemoryHandle] | KvChunk | kv_pb2.ReleaseConfirmed, None]:
        """Yields the KvSource, the chunks, and ReleaseConfirmed as the answer to `release`. Raises MillraceError."""
        try:
            await self._say(kv_pb2.FetchRequest(open=self._opening))
            while (response := await self._next()) is not None:
                match response.WhichOneof("message"):
                    case "source":
                        yield [convert.core_memory(memory) for memory in response.source.ranks]
                    case "chunk":
                        yield convert.core_chunk(self._id, response.chunk)
                    case "release_confirmed":
                        yield response.release_confirmed
        finally:
            self._call.cancel()

    async def release(self) -> None:
        await self._say(kv_pb2.FetchRequest(release=kv_pb2.FetchRelease()))

    async def failed(self, report: kv_pb2.ReadFailed) -> None:
        await self._say(kv_pb2.FetchRequest(failed=report))

    async def _say(self, message: kv_pb2.FetchRequest) -> None:
        """Sends a message. On a stream that has ended it is lost, and `items` raises the reason. A write is never over
        for gRPC when the channel was closed before the call had begun.
        """
        async with self._writing:
            with contextlib.suppress(MillraceError, asyncio.InvalidStateError, TimeoutError):
                await reply(heard_within(self._stall_s, self._call.write(message)))

    async def _next(self) -> kv_pb2.FetchResponse | None:
        try:
            response = await reply(heard_within(self._stall_s, self._call.read()))
        except TimeoutError:
            message = f"{self._peer.address} has sent nothing for {self._stall_s:g} s"
            raise MillraceError(Reason.STALLED, message) from None
        except MillraceError as error:
            # The stream broke, and its channel was closed for that before gRPC had the status of the stream.
            if self._peer.dropped and error.reason is Reason.CANCELLED:
                raise MillraceError(Reason.WORKER_LOST, "its connection broke") from None
            if error.reason is Reason.UNAUTHENTICATED:  # that is our fault, not the client's
                raise MillraceError(Reason.TRANSFER_FAILED, error.message) from None
            raise
        return None if response is grpc.aio.EOF else response


class Peers:
    def __init__(
        self, drop_source: Callable[[int, str], None], identity: Identity | None = None, token: str = ""
    ) -> None:
        """`drop_source(rank, agent)` makes a rank disconnect from an exporter."""
        self._drop_source = drop_source
        self._identity = identity
        self._token = token
        self._peers: dict[tuple[str, str], Peer] = {}
        self._watches: dict[Peer, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._replaced: dict[grpc.aio.Channel, asyncio.Task[None]] = {}  # that wait for their last calls

    @property
    def epochs(self) -> frozenset[str]:
        """Of the workers that are connected."""
        return frozenset(epoch for _, epoch in self._peers)

    def get(self, address: str, epoch: str) -> Peer:
        peer = self._peers.get((address, epoch))
        if peer is None:
            peer = self._peers[address, epoch] = Peer(address, epoch, self._identity, self._token)
            self._watch(peer)
        elif (before := peer.renewed()) is not None:
            self._watch(peer)
            self._replaced[before] = asyncio.create_task(before.close(LAST_CALLS_S))
            self._replaced[before].add_done_callback(lambda _: self._replaced.pop(before, None))
        return peer

    def answered(self, peer: Peer) -> None:
        """So no other process is at its address: one with another epoch is gone, or is this one with other weights."""
        for other in [other for other in self._peers.values() if other.address == peer.address and other is not peer]:
            self.drop(other)

    def drop(self, peer: Peer) -> None:
        """Drop a peer. Idempotent: the peer may have a successor by then."""
        if self._peers.get((peer.address, peer.epoch)) is not peer:
            return
        del self._peers[peer.address, peer.epoch]
        peer.dropped = True
        log.info("dropped worker %s epoch=%s", peer.address, peer.epoch)
        kept = {agent for other in self._peers.values() for agent in other.agents}  # the same process by another name
        for rank, agent in sorted(peer.agents - kept):
            self._drop_source(rank, agent)
        self._watches.pop(peer).cancel()
        self._close(peer.close())

    def _watch(self, peer: Peer) -> None:
        """Watch the connection. Cancel it before the channel closes: gRPC does not always end it then."""
        if (before := self._watches.get(peer)) is not None:
            before.cancel()
        self._watches[peer] = asyncio.create_task(self._drop_when_lost(peer))

    async def _drop_when_lost(self, peer: Peer) -> None:
        if await peer.lost():
            self.drop(peer)

    def _close(self, closing: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Nothing waits for last calls: one that was cancelled before it was sent is never over for gRPC."""
        for peer in list(self._peers.values()):
            self.drop(peer)
        for replaced, waiting in self._replaced.items():
            waiting.cancel()
            self._close(replaced.close())
        await asyncio.gather(*self._closing)


def _start(call: Callable[[], T]) -> T:
    """Raises MillraceError when the peer was dropped before."""
    try:
        return call()
    except grpc.aio.UsageError as error:
        raise MillraceError(Reason.WORKER_LOST, str(error)) from error
