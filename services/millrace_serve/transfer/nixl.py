"""Transfer over NIXL's UCX backend: RDMA between hosts, CUDA IPC between GPUs of a host, CMA or TCP between CPU pools.

A peer on the importing side (transfer/polled.py):

1. `open` loads the exporter's metadata and prepares one descriptor per page of its pool, once.
2. `post` makes and posts a READ by two index lists. UCX wires the connection up at the first one. NIXL itself merges
   runs of pages that are adjacent on both sides.
3. A read is DONE when NIXL reports success. Any error means that the endpoint failed: no read of that peer starts any
   more, and all of its reads become FAILED after SETTLE_S (docs/explanation/kv-transfer.md, "A read").
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millrace_serve.transfer.base import MemoryHandle, PageBuffer, ReadState, TransferError, check_source
from millrace_serve.transfer.nixl_agent import NixlAgent
from millrace_serve.transfer.polled import PolledRead, PolledSink, SourcePeer

log = logging.getLogger(__name__)

SETTLE_S = 0.05  # from an endpoint's error to FAILED


class NixlSource(NixlAgent):
    """The exporting side of a pool."""

    def __init__(self, pool: PageBuffer, ucx: Mapping[str, str] | None = None) -> None:
        super().__init__(pool, ucx or {}, progress_thread=True)

    def handle(self) -> MemoryHandle:
        pool = self.pool
        return MemoryHandle(
            transport="nixl",
            agent=self.name,
            metadata=self.nixl.getLocalMD(),
            base=pool.address,
            page_bytes=pool.page_bytes,
            num_pages=pool.num_pages,
            device_id=pool.device_id,
            mem_type=pool.mem_type,
        )


@dataclass(eq=False)
class NixlPeer(SourcePeer):
    pages: int  # handle of the prepared descriptor list
    settled_at: float = 0.0  # when `error` is set


class NixlSink(PolledSink[NixlPeer]):
    """A read's handle is NIXL's request."""

    def __init__(self, pool: PageBuffer, ucx: Mapping[str, str] | None = None) -> None:
        super().__init__(pool)
        # no progress thread: our polls make the progress, and a second thread at it costs bandwidth
        self._agent = NixlAgent(pool, ucx or {}, progress_thread=False)
        self._ours = self._agent.prepare("", pool.address, pool)

    def open(self, source: MemoryHandle) -> NixlPeer:
        """Load the exporter's metadata and prepare the descriptors of all of its pages."""
        check_source(source, "nixl", self._pool)
        agent = self._agent
        try:
            name = agent.nixl.loadRemoteMD(source.metadata).decode()
        except agent.errors as error:
            raise TransferError(f"NIXL cannot read the metadata of {source.agent}: {error}") from error
        try:
            if name == source.agent:
                return NixlPeer(name, agent.prepare(name, source.base, source))
            problem = f"the metadata of {source.agent} belongs to {name}"
        except agent.errors as error:
            problem = f"{source.agent} does not export the pages it claims: {error}"
        self._quietly(agent.nixl.invalidateRemoteMD, name)
        raise TransferError(problem)

    def post(self, read: PolledRead[NixlPeer], src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
        agent, peer = self._agent, read.peer
        try:
            read.handle = agent.nixl.makeXferReq(
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
            raise TransferError(f"NIXL cannot read {len(src_pages)} pages of {peer.name}: {error}") from error
        self._step(read, lambda: agent.nixl.postXferReq(read.handle, b""))

    def progress(self, read: PolledRead[NixlPeer]) -> None:
        if not read.peer.error:
            self._step(read, lambda: self._agent.nixl.getXferStatus(read.handle))
        elif time.monotonic() >= read.peer.settled_at:
            self._quietly(self._agent.nixl.releaseXferReq, read.handle)
            self.finish(read, ReadState.FAILED, read.peer.error)
        else:
            self._quietly(self._agent.nixl.getNotifs, {}, [self._agent.backend])  # lets UCX flush the endpoint

    def let_go(self, peer: NixlPeer) -> None:
        self._quietly(self._agent.nixl.releasedDlistH, peer.pages)
        self._quietly(self._agent.nixl.invalidateRemoteMD, peer.name)

    def close(self) -> None:
        """Destroying the backend is what ends reads that are still in flight."""
        agent = self._agent
        if agent.closed:
            return
        for peer in list(self._peers.values()):
            peer.leaving = True
            for read in list(peer.reads):
                self._quietly(agent.nixl.releaseXferReq, read.handle)
                self.finish(read, ReadState.FAILED, "the importer was closed")
            self.disconnect(peer.name)
        self._quietly(agent.nixl.releasedDlistH, self._ours)
        agent.close()

    def _step(self, read: PolledRead[NixlPeer], call: Callable[[], object]) -> None:
        """Post a read, or ask how it is; an error ends its whole peer."""
        try:
            status = call()
        except self._agent.errors as error:
            peer = read.peer
            peer.error = f"reading from {peer.name} failed: {error}"
            peer.settled_at = time.monotonic() + SETTLE_S
            log.warning("%s, reads in flight: %d", peer.error, len(peer.reads))
            return
        if status == self._agent.lib.NIXL_SUCCESS:
            self._quietly(self._agent.nixl.releaseXferReq, read.handle)
            self.finish(read, ReadState.DONE)

    def _quietly(self, call: Callable[..., object], *what: object) -> None:
        """An error here changes no read's result, and a peer that disconnected was forgotten by NIXL itself."""
        with contextlib.suppress(*self._agent.errors):
            call(*what)
