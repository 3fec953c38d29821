"""The warm-up and GC-freeze hooks: what has to happen before a request may be sent to a worker.

For every prefill worker P and decode worker D with equal KV layouts, and for every unified worker U:

1. D.Warmup(source=P): a real tiny request through the whole path, which opens the transfer connection. U.Warmup.
2. FreezeGc on P and D (U).
3. Both acknowledged: the pair (U) is routable. Anything else is tried again after a pause, for as long as both live.

Pairs are known by the epochs of their processes, so a restarted worker starts again at 1. All of it is idempotent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc
from millrace.v1 import worker_pb2
from millrace_rpc.errors import MillraceError, Reason, from_rpc_error
from millrace_rpc.metrics import Metrics

from millrace_router.config import Timeouts
from millrace_router.link import DECODE, PREFILL, UNIFIED
from millrace_router.worker import Worker

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


@dataclass(frozen=True, slots=True)
class Pair:
    """Epochs. A unified worker is a pair of itself with an empty source."""

    source: str
    worker: str


def wanted(workers: Iterable[Worker]) -> dict[Pair, tuple[Worker | None, Worker]]:
    """Every pair that could serve."""
    usable = [worker for worker in workers if not worker.obstacle]
    sources = [worker for worker in usable if worker.role == PREFILL]
    pairs: dict[Pair, tuple[Worker | None, Worker]] = {}
    for worker in usable:
        if worker.role == UNIFIED:
            pairs[Pair("", worker.epoch)] = (None, worker)
        elif worker.role == DECODE:
            for source in sources:
                if source.info.layout.fingerprint == worker.info.layout.fingerprint:
                    pairs[Pair(source.epoch, worker.epoch)] = (source, worker)
    return pairs


class Hooks:
    def __init__(self, timeouts: Timeouts, metrics: Metrics, on_change: Callable[[], None]) -> None:
        self.ready: set[Pair] = set()
        self.trouble: dict[Pair, str] = {}  # why a wanted pair is not ready
        self._tasks: dict[Pair, asyncio.Task[None]] = {}
        self._timeouts = timeouts
        self._metrics = metrics
        self._on_change = on_change

    def reconcile(self, workers: Iterable[Worker]) -> None:
        """Start hooks for new pairs, forget those that are gone."""
        pairs = wanted(workers)
        for pair in self._tasks.keys() - pairs.keys():
            self._tasks.pop(pair).cancel()
            self.ready.discard(pair)
            self.trouble.pop(pair, None)
        for pair in pairs.keys() - self._tasks.keys():
            self._tasks[pair] = asyncio.create_task(self._until_ready(pair, *pairs[pair]))

    async def rerun(self, workers: Iterable[Worker]) -> int:
        """Run the hooks of every pair once more; returns how many. A failure is raised, and changes nothing."""
        pairs = wanted(workers)
        for source, worker in pairs.values():
            await self._once(source, worker)
        return len(pairs)

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _until_ready(self, pair: Pair, source: Worker | None, worker: Worker) -> None:
        names = f"{source.address} -> {worker.address}" if source else worker.address
        self.trouble[pair] = f"warming {names}"
        pause = FIRST_PAUSE_S
        while True:
            try:
                await self._once(source, worker)
            except MillraceError as error:
                log.warning("warm-up of %s failed: %s", names, error)
                self.trouble[pair] = f"warm-up of {names} failed: {error.message}"
                if error.reason is Reason.LAYOUT_MISMATCH:
                    return  # these two will never pair
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            log.info("warmed and frozen: %s", names)
            self.trouble.pop(pair, None)
            self.ready.add(pair)
            self._on_change()
            return

    async def _once(self, source: Worker | None, worker: Worker) -> None:
        request = worker_pb2.WarmupRequest(source=source.source() if source else None)
        await self._call("warmup", worker, "Warmup", request)
        for side in (source, worker):
            if side is not None:
                await self._call("freeze_gc", side, "FreezeGc", worker_pb2.FreezeGcRequest())

    async def _call(self, hook: str, worker: Worker, method: str, request: object) -> None:
        try:
            await getattr(worker.control, method)(request, timeout=self._timeouts.warmup)
        except grpc.aio.AioRpcError as error:
            self._metrics.hooks.labels(hook=hook, outcome="failed").inc()
            raise from_rpc_error(error) from error
        self._metrics.hooks.labels(hook=hook, outcome="ok").inc()
