"""The workers that discovery lists, and the tasks that keep their connections.

1. A new target becomes a `Worker`; its task starts at once.
2. A target that changes in place (readiness, labels) is handed to its Worker.
3. A target that is gone: its Worker is leaving. A leaving worker gets no new requests, keeps its Link for the running
   ones, and ends with the last of them, or when the Link fails. It does not reconnect.

An address belongs to one worker of `workers` at a time; a leaving worker can have the address of its successor.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence

from millrace_common.metrics import Metrics

from millrace_router.discovery.base import TROUBLES, Source, Target, diff
from millrace_router.fleet.worker import Worker

log = logging.getLogger(__name__)


class Fleet:
    """A listener of discovery."""

    def __init__(
        self, source: Source, make: Callable[[Target], Worker], metrics: Metrics, on_change: Callable[[], None]
    ) -> None:
        self.workers: dict[str, Worker] = {}  # by address
        self.leaving: set[Worker] = set()
        self._source = source
        self._make = make
        self._metrics = metrics
        self._on_change = on_change
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        for kind in TROUBLES:
            metrics.discovery_troubles.labels(kind=kind)

    def start(self) -> None:
        self._source.start(self)

    async def stop(self) -> None:
        await self._source.stop()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def on_targets(self, targets: Sequence[Target]) -> None:
        self._metrics.discovery_synced.set(time.time())
        changes = diff({worker.target.key: worker.target for worker in self.workers.values()}, targets)
        for target in changes.removed:
            self._leave(self.workers.pop(target.address))
        for target in changes.added:
            log.info("discovered %s", _name(target))
            worker = self.workers[target.address] = self._make(target)
            self._tasks[worker] = task = asyncio.create_task(worker.run())
            task.add_done_callback(functools.partial(self._ended, worker))
        for target in changes.updated:
            self.workers[target.address].target = target
        for change in ("removed", "added", "updated"):
            self._metrics.discovery_changes.labels(change=change).inc(len(getattr(changes, change)))
        if changes.removed or changes.added or changes.updated:
            self._on_change()

    def on_trouble(self, kind: str) -> None:
        self._metrics.discovery_troubles.labels(kind=kind).inc()

    def release(self) -> None:
        """End the leaving workers without running requests. Call it whenever a request has ended."""
        for worker in self.leaving:
            task = self._tasks[worker]
            if not worker.in_flight and not task.cancelling():
                task.cancel()

    def _leave(self, worker: Worker) -> None:
        log.info("%s is no longer listed; %d requests are running there", _name(worker.target), worker.in_flight)
        worker.leaving = True
        self.leaving.add(worker)
        self.release()

    def _ended(self, worker: Worker, task: asyncio.Task[None]) -> None:
        self.leaving.discard(worker)
        del self._tasks[worker]


def _name(target: Target) -> str:
    return f"{target.name} ({target.address})" if target.name else target.address
