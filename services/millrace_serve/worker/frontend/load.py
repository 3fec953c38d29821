"""The latest load of the engines, for routers (WatchLoad) and for Prometheus (on each scrape)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from millrace.v1 import worker_pb2
from millrace_common.metrics import Metrics

from millrace_serve.engine.core import Load
from millrace_serve.worker.frontend import convert
from millrace_serve.worker.frontend.wakeup import Wakeup

DOING = ("running", "waiting", "importing", "exporting")
PAGES = ("free", "cached", "published", "running")
COUNTED = ("steps", "preemptions", "prompt_tokens", "cached_tokens", "output_tokens")


class LoadBoard:
    def __init__(self, replicas: int, state: Callable[[], worker_pb2.WorkerState], epoch: str) -> None:
        """`state` gives the worker's current WorkerState."""
        self.loads: list[Load] = [Load()] * replicas
        self.changed = Wakeup()
        self._state = state
        self._epoch = epoch
        self._reported: dict[Any, int] = {}  # by counter

    def update(self, replica: int, load: Load) -> None:
        if load != self.loads[replica]:
            self.loads[replica] = load
            self.changed.fire()

    @property
    def idle(self) -> bool:
        """Whether no engine has work, and every page is free or an idle page of the prefix cache."""
        return all(
            not any(getattr(load, name) for name in DOING) and load.pages_free + load.pages_cached == load.pages_total
            for load in self.loads
        )

    def snapshot(self) -> worker_pb2.LoadSnapshot:
        replicas = [convert.wire_load(load) for load in self.loads]
        return worker_pb2.LoadSnapshot(epoch=self._epoch, state=self._state(), replicas=replicas)

    async def watch(self, min_interval_s: float, max_interval_s: float) -> AsyncIterator[worker_pb2.LoadSnapshot]:
        """Yield a snapshot at once, then on change, every `min_interval_s` to `max_interval_s`."""
        while True:
            sent = self.snapshot()
            yield sent
            await asyncio.sleep(min_interval_s)
            if self.snapshot() == sent:
                await self.changed.wait(max_interval_s - min_interval_s)

    def report(self, metrics: Metrics) -> None:
        for index, load in enumerate(self.loads):
            replica = str(index)
            for name in DOING:
                metrics.sequences.labels(replica=replica, doing=name).set(getattr(load, name))
            for use in PAGES:
                metrics.pages.labels(replica=replica, use=use).set(getattr(load, f"pages_{use}"))
            metrics.waiting_tokens.labels(replica=replica).set(load.waiting_tokens)
            metrics.credits.labels(replica=replica).set(load.credits)
            for name in COUNTED:
                self._advance(metrics.engine.labels(replica=replica, what=name), getattr(load, name))
            for counter, counts in ((metrics.drafts, load.drafted), (metrics.drafts_accepted, load.accepted)):
                for position, count in enumerate(counts, 1):
                    self._advance(counter.labels(replica=replica, position=position), count)

    def _advance(self, counter: Any, count: int) -> None:
        counter.inc(count - self._reported.get(counter, 0))
        self._reported[counter] = count
