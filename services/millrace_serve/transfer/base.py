"""The interfaces of a transport for KV pages, and the facts that both sides exchange.

The exporter registers its pool once and describes it (`MemoryHandle`). The importer reads pages out of it, and
starts and finishes every operation itself: when a `ReadOp` is done or failed, nothing of it is in flight any more, so
its pages may be freed; before that, never. The exporter takes no part in a read, which is why the lease (lease.py) and
the fenced Release exist: they prove after the fact that the pages were not reused while being read.
"""

import abc
import enum
from collections.abc import Sequence

import msgspec

MOST_PAGES = 1 << 22  # of a pool: a transport describes each page, in some 30 bytes


class MemoryHandle(msgspec.Struct, frozen=True):
    """The place of one rank's page pool. Opaque to everything but the transport that made it."""

    transport: str  # "nixl"; tests have others
    agent: str  # unique name of the exporting agent
    metadata: bytes  # what the importer needs to reach it
    base: int  # address of page 0
    page_bytes: int
    num_pages: int
    device_id: int = 0
    mem_type: str = "DRAM"  # "DRAM" | "VRAM"


class PageBuffer(msgspec.Struct, frozen=True):
    """One contiguous pool: page i lies at address + i * page_bytes. The caller keeps the memory alive until close."""

    address: int
    page_bytes: int
    num_pages: int
    mem_type: str = "DRAM"  # "DRAM" | "VRAM"
    device_id: int = 0

    @property
    def nbytes(self) -> int:
        return self.page_bytes * self.num_pages


class ReadState(enum.StrEnum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class ReadOp(abc.ABC):
    """One posted read of a batch of pages."""

    error = ""  # the reason of FAILED
    corrupt = False  # of FAILED: pages have other bytes than the exporter wrote

    @abc.abstractmethod
    def poll(self) -> ReadState:
        """Current state; DONE and FAILED are final and mean that nothing is in flight."""


class KvSink(abc.ABC):
    """Importing side of a pool. Not thread-safe: one thread owns it."""

    @abc.abstractmethod
    def connect(self, source: MemoryHandle) -> None:
        """Make `source` readable. Idempotent. Raises TransferError when the peer cannot be used or its pages differ in
        size. A transport may connect lazily: then the first read of a peer that is gone ends as FAILED."""

    @abc.abstractmethod
    def read(self, source: MemoryHandle, src_pages: Sequence[int], dst_pages: Sequence[int]) -> ReadOp:
        """Start copying page src_pages[i] of `source` into our page dst_pages[i]. Raises TransferError when `source` is
        not connected (any more) or a page id lies outside its pool; then nothing was started."""

    @abc.abstractmethod
    def disconnect(self, agent: str) -> None:
        """Forget a peer that died or restarted: no new reads; those in flight run to their end. Idempotent."""

    @abc.abstractmethod
    def close(self) -> None:
        """Afterwards nothing is in flight, and every ReadOp is final. Idempotent."""


class TransferError(Exception):
    """An unreachable peer, or memory that does not fit. The message names it."""


def check_pages(source: MemoryHandle, ours: PageBuffer, src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
    """The checks of every transport before it touches memory."""
    if not src_pages or len(src_pages) != len(dst_pages):
        raise TransferError(f"read of {len(src_pages)} source pages into {len(dst_pages)} destination pages")
    for name, pages, limit in (("src_pages", src_pages, source.num_pages), ("dst_pages", dst_pages, ours.num_pages)):
        if min(pages) < 0 or max(pages) >= limit:
            bad = next(page for page in pages if not 0 <= page < limit)
            raise TransferError(f"{name} holds page {bad}, the pool has pages 0 to {limit - 1}")


def check_source(source: MemoryHandle, transport: str, ours: PageBuffer) -> None:
    if source.transport != transport:
        raise TransferError(f"{source.agent} exports over {source.transport!r}, this worker imports over {transport!r}")
    if source.mem_type not in ("DRAM", "VRAM"):
        raise TransferError(f"{source.agent} has pages in {source.mem_type!r}, this worker knows DRAM and VRAM")
    if source.page_bytes != ours.page_bytes:
        raise TransferError(f"{source.agent} has pages of {source.page_bytes} bytes, ours have {ours.page_bytes}")
    if source.num_pages > MOST_PAGES:
        raise TransferError(f"num_pages of {source.agent} is {source.num_pages}; the limit is {MOST_PAGES}")
