"""Messages between the frontend and the reader of a rank (transfer/reader.py). They cross a process boundary."""

import msgspec

from millrace_serve.engine.core import RequestId
from millrace_serve.transfer.base import MemoryHandle


class AddSource(msgspec.Struct, frozen=True, tag=True):
    """Pages of this exporter will be read; connect to it now."""

    source: MemoryHandle


class DropSource(msgspec.Struct, frozen=True, tag=True):
    """The exporter is gone: no new reads from it."""

    agent: str


class ReadPages(msgspec.Struct, frozen=True, tag=True):
    """Copy page src_pages[i] of an added source to our page dst_pages[i]; answered by ReadDone."""

    id: RequestId
    read: int  # 0, 1, ... within the import
    src_pages: list[int]
    dst_pages: list[int]
    agent: str = ""  # of the source; filled in for each rank, because every rank reads from its own exporter


class StopReader(msgspec.Struct, frozen=True, tag=True):
    """Let the reads in flight end, then close the transport."""


ToReader = AddSource | DropSource | ReadPages | StopReader


class ReadDone(msgspec.Struct, frozen=True, tag=True):
    """Final: nothing of the read is in flight. `error` is empty when every page arrived."""

    id: RequestId
    read: int
    error: str
    num_pages: int
    corrupt: bool = False  # pages came with other bytes than the exporter wrote


class ReadStuck(msgspec.Struct, frozen=True, tag=True):
    """The read takes too long; ReadDone follows when it is final."""

    id: RequestId
    read: int


FromReader = ReadDone | ReadStuck
