"""Messages between the frontend and the ranks, besides those of the engine (engine/core.py) and of the reader
(transfer/messages.py).

    frontend -> engine thread   EngineInput, FreezeGc, StartProfile, StopProfile, SetWeights, Stop
    frontend -> reader thread   ToReader
    rank -> frontend            FromRank(rank, Report)

Messages of one line arrive in the order in which they were sent; between lines there is no order.
"""

from typing import Literal

import msgspec
from millrace_common.gc_hooks import GcPause

from millrace_serve.engine.cache.kv_pool import KvLayout
from millrace_serve.engine.core import EngineInput, Events
from millrace_serve.engine.health.rank_watch import RankHeartbeat
from millrace_serve.transfer.base import MemoryHandle
from millrace_serve.transfer.messages import FromReader


class FreezeGc(msgspec.Struct, frozen=True, tag=True):
    """Collect and freeze; answered by GcFrozen."""


class StartProfile(msgspec.Struct, frozen=True, tag=True):
    """Answered by ProfileDone with the path that the trace will have."""

    folder: str
    label: str  # of the file's name


class StopProfile(msgspec.Struct, frozen=True, tag=True):
    """Write the trace; answered by ProfileDone."""


class SetWeights(msgspec.Struct, frozen=True, tag=True):
    """Load the checkpoint at `path` over the weights, and call them `version`; answered by WeightsSet. Only while every
    engine is paused and empty.
    """

    path: str  # empty: the weights stay
    version: str
    check: bool = False  # touch nothing: only say whether they could be loaded


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the engine loop in good order."""


ToProcess = FreezeGc | StartProfile | StopProfile | SetWeights
ToEngine = EngineInput | ToProcess | Stop


class RankProgress(msgspec.Struct, frozen=True, tag=True):
    state: Literal["loading", "compiling"]  # names of lifecycle.State
    message: str


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """The engine can step. `memory`: where other workers read this rank's pages."""

    engine_endpoint: str
    reader_endpoint: str
    vocab_size: int
    max_context: int
    eos_token_ids: list[int]
    layout: KvLayout
    num_pages: int  # of the KV pool, the sink included
    startup: dict[str, float]  # seconds by phase (engine/start/phases.py)
    memory: MemoryHandle


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The last words of a rank that ends by an error."""

    message: str
    refused: bool = False  # the settings or the checkpoint are at fault, so another start ends alike


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """The rank could not decode a message."""


class GcPauses(msgspec.Struct, frozen=True, tag=True):
    pauses: list[GcPause]


class GcFrozen(msgspec.Struct, frozen=True, tag=True):
    objects: int


class ProfileDone(msgspec.Struct, frozen=True, tag=True):
    path: str
    error: str  # empty when it worked


class WeightsSet(msgspec.Struct, frozen=True, tag=True):
    layout: KvLayout  # of the weights that the rank has now
    error: str  # empty when it worked


Answer = GcFrozen | ProfileDone | WeightsSet  # of a rank, to the frontend's question
Report = Events | FromReader | RankHeartbeat | RankProgress | RankReady | RankFailed | GcPauses | Dropped | Answer


class FromRank(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    report: Report
