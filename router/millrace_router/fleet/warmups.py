"""The warm-up and GC-freeze hooks, which run before a worker gets its first request.

For every prefill worker P and decode worker D of one revision with equal KV layouts, and for every unified worker U. A
flexible worker is all three, P and D for every other worker:

1. WARMING   D.Warmup(source=P): a real tiny request through the whole path, which opens the transfer connection.
             U.Warmup. A decode worker warms a few pairs at a time.
2. FREEZING  FreezeGc on P and D (U). Pairs that need it at the same time share one call.
3. READY     both have acknowledged.
4. RETRYING  every failure is retried after a pause, for as long as both live: from 1, until both have acknowledged.
   REFUSED   these two can never pair.

Pairs are identified by the epochs of their processes, so a restarted worker starts again at 1. All steps are
idempotent.
"""

import asyncio
import enum
import functools
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from millrace.v1 import worker_pb2
from millrace_common.metrics import Metrics
from millrace_common.reasons import Reason
from millrace_rpc.client import reply
from millrace_rpc.errors import MillraceError

from millrace_router.fleet.link import DECODE, FLEXIBLE, PREFILL, UNIFIED
from millrace_router.fleet.states import Pair
from millrace_router.fleet.worker import Worker

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
WARMUPS_AT_ONCE = 4  # of one decode worker
WARMUP_S = 120.0  # one warm-up or GC freeze


class PairStage(enum.StrEnum):
    WARMING = "warming"
    FREEZING = "freezing"
    RETRYING = "retrying"
    READY = "ready"
    REFUSED = "refused"


@dataclass(slots=True)
class PairProgress:
    source: Worker | None
    worker: Worker
    stage: PairStage = PairStage.WARMING
    attempts: int = 0
    detail: str = ""  # of the latest failure
    acknowledged: bool = False  # by both: only the look at what they say of it is left

    @property
    def names(self) -> str:
        return f"{self.source.address} -> {self.worker.address}" if self.source else self.worker.address

    def __str__(self) -> str:
        return f"{self.stage} {self.names}" + (f": {self.detail}" if self.detail else "")


def wanted(workers: Iterable[Worker]) -> dict[Pair, tuple[Worker | None, Worker]]:
    """Return every pair that could serve. Readiness in discovery does not matter: it changes without a new process."""
    usable = [worker for worker in workers if not worker.unhealthy and worker.drained_epoch != worker.epoch]
    sources = [worker for worker in usable if worker.role in (PREFILL, FLEXIBLE)]
    pairs: dict[Pair, tuple[Worker | None, Worker]] = {}
    for worker in usable:
        if worker.role in (UNIFIED, FLEXIBLE):
            pairs[Pair("", worker.epoch)] = (None, worker)
        if worker.role in (DECODE, FLEXIBLE):
            for source in sources:
                if source is not worker and _fit(source, worker):
                    pairs[Pair(source.epoch, worker.epoch)] = (source, worker)
    return pairs


def _fit(source: Worker, worker: Worker) -> bool:
    same = source.info.layout.fingerprint == worker.info.layout.fingerprint
    return same and source.target.revision == worker.target.revision


class Warmups:
    def __init__(self, metrics: Metrics, on_change: Callable[[], None]) -> None:
        self.ready: set[Pair] = set()
        self.progress: dict[Pair, PairProgress] = {}
        self._tasks: dict[Pair, asyncio.Task[None]] = {}
        self._warming: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(WARMUPS_AT_ONCE))
        self._freezers: defaultdict[str, Shared] = defaultdict(Shared)  # both by epoch
        self._metrics = metrics
        self._on_change = on_change

    def reconcile(self, workers: Iterable[Worker]) -> None:
        pairs = wanted(workers)
        for pair in self._tasks.keys() - pairs.keys():
            self._tasks.pop(pair).cancel()
            self.ready.discard(pair)
            del self.progress[pair]
        for pair in pairs.keys() - self._tasks.keys():
            self.progress[pair] = progress = PairProgress(*pairs[pair])
            self._tasks[pair] = asyncio.create_task(self._until_ready(pair, progress))
        alive = {epoch for pair in pairs for epoch in (pair.source, pair.worker)}
        for by_epoch in (self._warming, self._freezers):
            for epoch in by_epoch.keys() - alive:
                del by_epoch[epoch]
        self._count()

    async def rerun(self, workers: Iterable[Worker]) -> int:
        """Run the hooks of every pair once more; returns the number. Raises a failure after all have ended."""
        pairs = wanted(workers)
        runs = (self._once(PairProgress(*both)) for both in pairs.values())
        for result in await asyncio.gather(*runs, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        return len(pairs)

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def why_not(self, epoch: str) -> str:
        """Why a fit worker is in no ready pair."""
        own = [str(it) for pair, it in self.progress.items() if epoch in (pair.source, pair.worker)]
        return "; ".join(own) or "no worker of the other role with an equal KV layout and revision"

    async def _until_ready(self, pair: Pair, progress: PairProgress) -> None:
        pause = FIRST_PAUSE_S
        while True:
            try:
                await self._once(progress)
            except Exception as error:  # also garbage of a worker's, or a fault of ours: it would never be tried again
                failure = MillraceError.of(error, log, "the warm-up of %s broke unexpectedly", progress.names)
            else:
                log.info("warmed and frozen: %s", progress.names)
                progress.stage, progress.detail = PairStage.READY, ""
                self.ready.add(pair)
                self._count()
                self._on_change()
                return
            log.warning("warm-up of %s failed: %s", progress.names, failure)
            progress.stage, progress.detail = PairStage.RETRYING, failure.message
            if failure.reason is Reason.LAYOUT_MISMATCH:
                progress.stage = PairStage.REFUSED
                self._count()
                return
            self._count()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _once(self, progress: PairProgress) -> None:
        source, worker = progress.source, progress.worker
        sides = [side for side in (source, worker) if side is not None]
        progress.attempts += 1
        if not progress.acknowledged:
            progress.stage = PairStage.WARMING
            request = worker_pb2.WarmupRequest(source=source.source() if source else None)
            async with self._warming[worker.epoch]:
                await self._call("warmup", lambda: worker.control.Warmup(request, timeout=WARMUP_S))
            progress.stage = PairStage.FREEZING
            for side in sides:
                await self._freezers[side.epoch].run(functools.partial(self._freeze, side))
            progress.acknowledged = True
        for side in sides:
            await self._call("info", side.refresh)  # with the freezes and the warmed sources

    async def _freeze(self, worker: Worker) -> None:
        request = worker_pb2.FreezeGcRequest()
        await self._call("freeze_gc", lambda: worker.control.FreezeGc(request, timeout=WARMUP_S))

    async def _call(self, hook: str, call: Callable[[], Awaitable[object]]) -> None:
        outcome = "failed"
        try:
            await reply(call())
            outcome = "ok"
        finally:
            self._metrics.warmups.labels(call=hook, outcome=outcome).inc()

    def _count(self) -> None:
        counts = Counter(progress.stage for progress in self.progress.values())
        for stage in PairStage:
            self._metrics.pairs.labels(state=stage).set(counts[stage])


class Shared:
    """Work that one run does for all callers who asked before it began: at most one run is active and one is due."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._asked = 0
        self._covered = 0

    async def run(self, call: Callable[[], Awaitable[None]]) -> None:
        """Return after a run that began after this was called. A failed run is the failure of one caller only."""
        self._asked += 1
        mine = self._asked
        async with self._lock:
            if self._covered < mine:
                asked = self._asked
                await call()
                self._covered = asked
