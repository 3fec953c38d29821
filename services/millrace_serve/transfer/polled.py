"""The common part of the transports: a table of peers, and reads that advance when they are polled.

Life of a peer: 1. `connect` opens it; 2. reads; 3. `disconnect`, or an error of the transport: it takes no new reads;
4. with its last read final it is let go, and `connect` may open it again.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from millrace_serve.transfer.base import KvSink, MemoryHandle, PageBuffer, ReadOp, ReadState, TransferError, check_pages


@dataclass(eq=False)
class SourcePeer:
    name: str
    reads: "set[PolledRead[Any]]" = field(default_factory=set, kw_only=True)  # not final; Any: a peer of this class
    leaving: bool = field(default=False, kw_only=True)  # it was disconnected
    error: str = field(default="", kw_only=True)  # of the transport


P = TypeVar("P", bound=SourcePeer)


class PolledRead(ReadOp, Generic[P]):
    def __init__(self, sink: "PolledSink[P]", peer: P) -> None:
        self.peer = peer
        self.handle: Any = None  # the transport's own
        self.state = ReadState.PENDING
        self._sink = sink

    def poll(self) -> ReadState:
        if self.state is ReadState.PENDING:
            self._sink.progress(self)
        return self.state


class PolledSink(KvSink, Generic[P]):
    def __init__(self, pool: PageBuffer) -> None:
        self._pool = pool
        self._peers: dict[str, P] = {}

    @abc.abstractmethod
    def open(self, source: MemoryHandle) -> P:
        """Make `source` readable. Raises TransferError when it cannot be."""

    @abc.abstractmethod
    def post(self, read: PolledRead[P], src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
        """Start the read and set its handle. Raises TransferError when nothing was started."""

    @abc.abstractmethod
    def progress(self, read: PolledRead[P]) -> None:
        """Look at a read that is not final, and `finish` it when it is."""

    @abc.abstractmethod
    def let_go(self, peer: P) -> None:
        """Undo `open`."""

    def connect(self, source: MemoryHandle) -> None:
        peer = self._peers.get(source.agent)
        if peer is None:
            try:
                self._peers[source.agent] = self.open(source)
            except TransferError:
                raise
            except Exception as error:  # of a claim that the transport's library cannot follow
                raise TransferError(f"{source.agent} cannot be read: {type(error).__name__}: {error}") from error
        elif peer.error:
            raise TransferError(f"{source.agent} failed and is still settling: {peer.error}")
        else:
            peer.leaving = False

    def read(self, source: MemoryHandle, src_pages: Sequence[int], dst_pages: Sequence[int]) -> ReadOp:
        peer = self._peers.get(source.agent)
        if peer is None or peer.leaving or peer.error:
            raise TransferError(f"{source.agent} is not connected{': ' + peer.error if peer and peer.error else ''}")
        check_pages(source, self._pool, src_pages, dst_pages)
        read = PolledRead(self, peer)
        peer.reads.add(read)
        try:
            self.post(read, src_pages, dst_pages)
        except TransferError:
            peer.reads.remove(read)
            raise
        return read

    def disconnect(self, agent: str) -> None:
        if peer := self._peers.get(agent):
            peer.leaving = True
            self._drop_if_unused(peer)

    def finish(self, read: PolledRead[P], state: ReadState, error: str = "") -> None:
        read.state, read.error = state, error
        read.peer.reads.discard(read)
        self._drop_if_unused(read.peer)

    def _drop_if_unused(self, peer: P) -> None:
        if not peer.reads and (peer.leaving or peer.error) and self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            self.let_go(peer)
