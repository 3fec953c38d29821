"""Transfer over NIXL's UCX backend: RDMA between hosts, CUDA IPC between GPUs of a host, CMA or TCP between CPU pools.

Life of a peer on the importing side:

1. `connect` loads the exporter's metadata and prepares one descriptor per page of its pool, once.
2. `read` makes and posts a READ by two index lists. UCX wires the connection up at the first one. NIXL itself merges
   runs of pages that are adjacent on both sides.
3. A read is DONE when NIXL reports success. Any error means that the endpoint failed: no read of that peer starts any
   more, and all of its reads become FAILED after `settle_s`, in which UCX flushes the endpoint. NIXL reports the error
   of one read while others of the same endpoint may still be on the wire.
4. With the last read final, a failed or disconnected peer is dropped; `connect` may then load it again.

A read in flight is never cancelled: NIXL's cancel gives the request up without waiting for its data. Only `close` does
so, and then destroys the backend that could still write.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from millrace_serve.transfer.base import (
    KvSink,
    KvSource,
    MemoryHandle,
    PageBuffer,
    ReadOp,
    ReadState,
    TransferError,
    check_pages,
    check_source,
)
from millrace_serve.transfer.nixl_agent import NixlAgent, NixlConfig

log = logging.getLogger(__name__)


class NixlSource(KvSource):
    """`shared`: what CUDA IPC needs to know about the same pool, for importers on this host."""

    def __init__(
        self, pool: PageBuffer, config: NixlConfig | None = None, label: str = "kv", shared: bytes = b""
    ) -> None:
        self._agent = NixlAgent(label, pool, config or NixlConfig(), progress_thread=True)
        self._shared = shared

    def handle(self) -> MemoryHandle:
        agent, pool = self._agent, self._agent.pool
        return MemoryHandle(
            transport="nixl",
            agent=agent.name,
            metadata=agent.nixl.getLocalMD(),
            base=pool.address,
            page_bytes=pool.page_bytes,
            num_pages=pool.num_pages,
            device_id=pool.device_id,
            mem_type=pool.mem_type,
            shared=self._shared,
        )

    def close(self) -> None:
        self._agent.close()


class NixlSink(KvSink):
    def __init__(
        self,
        pool: PageBuffer,
        config: NixlConfig | None = None,
        label: str = "kv",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config or NixlConfig()
        self._clock = clock
        # no progress thread: our polls make the progress, and a second thread at it costs bandwidth
        self._agent = NixlAgent(label, pool, self._config, progress_thread=False)
        self._ours = self._agent.prepare(
            "", pool.mem_type, pool.address, pool.page_bytes, pool.device_id, pool.num_pages
        )
        self._peers: dict[str, _Peer] = {}

    def connect(self, source: MemoryHandle) -> None:
        check_source(source, "nixl", self._agent.pool)
        if peer := self._peers.get(source.agent):
            if peer.error:
                raise TransferError(f"{source.agent} failed and is still settling: {peer.error}")
            peer.leaving = False
            return
        self._peers[source.agent] = _Peer(source.agent, self._load(source))

    def read(self, source: MemoryHandle, src_pages: Sequence[int], dst_pages: Sequence[int]) -> ReadOp:
        peer = self._peers.get(source.agent)
        if peer is None or peer.leaving or peer.error:
            raise TransferError(f"{source.agent} is not connected{': ' + peer.error if peer and peer.error else ''}")
        check_pages(source, self._agent.pool, src_pages, dst_pages)
        agent = self._agent
        try:
            request = agent.nixl.makeXferReq(
                agent.lib.NIXL_READ,
                self._ours,
                np.asarray(dst_pages, dtype=np.int32),
                peer.pages,
                np.asarray(src_pages, dtype=np.int32),
                b"",
                [agent.backend],
                False,
            )
        except agent.errors as error:
            raise TransferError(f"NIXL cannot read {len(src_pages)} pages of {source.agent}: {error}") from error
        op = _NixlRead(self, peer, request)
        peer.reads.add(op)
        self._progress(op, lambda: agent.nixl.postXferReq(request, b""))
        return op

    def disconnect(self, agent: str) -> None:
        if peer := self._peers.get(agent):
            peer.leaving = True
            self._drop_if_unused(peer)

    def close(self) -> None:
        """Destroying the backend is what ends reads that are still in flight."""
        if self._agent.closed:
            return
        reads = [op for peer in self._peers.values() for op in peer.reads]
        agent = self._agent
        for op in reads:
            with contextlib.suppress(*agent.errors):
                agent.nixl.releaseXferReq(op.request)
            op.end(ReadState.FAILED, "the importer was closed")
        for peer in list(self._peers.values()):
            peer.reads.clear()
            peer.leaving = True
            self._drop_if_unused(peer)
        agent.nixl.releasedDlistH(self._ours)
        agent.close()

    def poll(self, op: _NixlRead) -> None:
        """Moves `op` forward if it is not final."""
        if not op.peer.error:
            self._progress(op, lambda: self._agent.nixl.getXferStatus(op.request))
        elif self._clock() >= op.peer.settled_at:
            self._end(op, ReadState.FAILED, op.peer.error)
        else:
            self._agent.nixl.getNotifs({}, [self._agent.backend])  # lets UCX flush the endpoint

    def _load(self, source: MemoryHandle) -> int:
        """Handle of the prepared descriptors of every page of `source`."""
        agent = self._agent
        try:
            name = agent.nixl.loadRemoteMD(source.metadata).decode()
        except agent.errors as error:
            raise TransferError(f"NIXL cannot read the metadata of {source.agent}: {error}") from error
        try:
            if name == source.agent:
                return agent.prepare(
                    name, source.mem_type, source.base, source.page_bytes, source.device_id, source.num_pages
                )
            problem = f"the metadata of {source.agent} belongs to {name}"
        except agent.errors as error:
            problem = f"{source.agent} does not export the pages it claims: {error}"
        self._forget(name)
        raise TransferError(problem)

    def _progress(self, op: _NixlRead, call: Callable[[], Any]) -> None:
        try:
            status = call()
        except self._agent.errors as error:
            op.peer.error = f"reading from {op.peer.name} failed: {error}"
            op.peer.settled_at = self._clock() + self._config.settle_s
            log.warning("%s, reads in flight: %d", op.peer.error, len(op.peer.reads))
            return
        if status == self._agent.lib.NIXL_SUCCESS:
            self._end(op, ReadState.DONE, "")

    def _end(self, op: _NixlRead, state: ReadState, error: str) -> None:
        self._agent.nixl.releaseXferReq(op.request)
        op.end(state, error)
        op.peer.reads.remove(op)
        self._drop_if_unused(op.peer)

    def _drop_if_unused(self, peer: _Peer) -> None:
        if peer.reads or not (peer.leaving or peer.error):
            return
        self._agent.nixl.releasedDlistH(peer.pages)
        self._forget(peer.name)
        del self._peers[peer.name]

    def _forget(self, name: str) -> None:
        with contextlib.suppress(*self._agent.errors):  # NIXL forgets a peer that disconnected by itself
            self._agent.nixl.invalidateRemoteMD(name)


class _Peer:
    def __init__(self, name: str, pages: int) -> None:
        self.name = name
        self.pages = pages  # handle of the prepared descriptor list
        self.reads: set[_NixlRead] = set()  # not final
        self.leaving = False
        self.error = ""
        self.settled_at = 0.0  # when `error` is set


class _NixlRead(ReadOp):
    def __init__(self, sink: NixlSink, peer: _Peer, request: int) -> None:
        self._sink = sink
        self.peer = peer
        self.request = request
        self._state = ReadState.PENDING
        self._error = ""

    def poll(self) -> ReadState:
        if self._state is ReadState.PENDING:
            self._sink.poll(self)
        return self._state

    def end(self, state: ReadState, error: str) -> None:
        self._state, self._error = state, error

    @property
    def error(self) -> str:
        return self._error
