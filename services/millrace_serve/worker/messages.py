"""What the frontend and the ranks say to each other, besides the engine's own messages (engine/core.py).

    frontend -> engine thread     EngineInput, FreezeGc, StartProfile, StopProfile, Stop
    frontend -> transfer thread   AddSource, DropSource, ReadPages, Stop
    rank -> frontend              FromRank(rank, Report)

Order is kept within one line of this table, and nowhere else.
"""

from __future__ import annotations

import msgspec
from millrace_common.gc_hooks import GcPause

from millrace_serve.engine.cache.kv_pool import KvLayout
from millrace_serve.engine.core import EngineInput, Events, RequestId
from millrace_serve.transfer.base import MemoryHandle


class FreezeGc(msgspec.Struct, frozen=True, tag=True):
    """Collect and freeze; answered by GcFrozen."""


class StartProfile(msgspec.Struct, frozen=True, tag=True):
    """Answered by ProfileDone with the path that the trace will have."""

    folder: str
    label: str  # of the file's name


class StopProfile(msgspec.Struct, frozen=True, tag=True):
    """Write the trace; answered by ProfileDone."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the thread in good order."""


ToEngine = EngineInput | FreezeGc | StartProfile | StopProfile | Stop


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
    agent: str
    src_pages: list[int]
    dst_pages: list[int]


ToTransfer = AddSource | DropSource | ReadPages | Stop


class RankProgress(msgspec.Struct, frozen=True, tag=True):
    state: str  # a name of lifecycle.State
    message: str


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """The engine can step. `memory` is set where other workers may read this rank's pages."""

    engine_endpoint: str
    transfer_endpoint: str
    vocab_size: int
    max_context: int
    eos_token_ids: list[int]
    layout: KvLayout
    num_pages: int  # of the KV pool, the sink included
    startup: dict[str, float]  # seconds by phase (engine/start/phases.py)
    memory: MemoryHandle | None


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The last words of a rank that ends by an error."""

    message: str


class ReadDone(msgspec.Struct, frozen=True, tag=True):
    """Final: nothing of the read is in flight. `error` is empty when every page arrived."""

    id: RequestId
    read: int
    error: str
    num_pages: int


class ReadStuck(msgspec.Struct, frozen=True, tag=True):
    """The read takes too long; ReadDone follows when it is final."""

    id: RequestId
    read: int


class SourceAdded(msgspec.Struct, frozen=True, tag=True):
    agent: str
    error: str


class GcPauses(msgspec.Struct, frozen=True, tag=True):
    pauses: list[GcPause]


class GcFrozen(msgspec.Struct, frozen=True, tag=True):
    objects: int


class ProfileDone(msgspec.Struct, frozen=True, tag=True):
    path: str
    error: str  # empty when it worked


Report = (
    Events
    | RankProgress
    | RankReady
    | RankFailed
    | ReadDone
    | ReadStuck
    | SourceAdded
    | GcPauses
    | GcFrozen
    | ProfileDone
)


class FromRank(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    report: Report
