"""The input and the parts of a rank."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.health.progress import Progress
from millrace_serve.transfer.checked import Check
from millrace_serve.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class RankSpec:
    config: WorkerConfig
    rank: int
    frontend: str  # endpoint of the frontend's inbox
    bind: str  # where the rank's own inboxes listen: a ZeroMQ endpoint with {name} in it
    rendezvous: str  # init_method of torch.distributed
    group: str = ""  # makes the key of the channels, with the deployment's secret (worker/channels.py)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a rank: `engine` on a leader, `run` (which the leader ends) on a follower."""

    pool: KvPool
    progress: Progress
    vocab_size: int
    max_context: int
    eos_token_ids: list[int]
    engine: Engine | None = None
    run: Callable[[], None] | None = None
    leave: Callable[[], None] | None = None  # the other ranks
    check: Check | None = None  # of pages that were read; None: they carry no checksum
    load: Callable[[Path, bool], str] | None = None  # a checkpoint over the weights, or only check it; returns its hash
