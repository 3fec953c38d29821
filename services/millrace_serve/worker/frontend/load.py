"""The latest load of the engines, for routers (WatchLoad) and for Prometheus (on each scrape)."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict

from millrace.v1 import worker_pb2
from millrace_common.metrics import POSITION, WORKER, Metrics
from millrace_common.rate import Rate
from millrace_common.step_times import StepTimes
from prometheus_client import Counter

from millrace_serve.engine.core import Load
from millrace_serve.worker.frontend import convert
from millrace_serve.worker.frontend.wakeup import Wakeup

DOING = ("running", "waiting", "importing", "exporting")
PAGES = ("free", "cached", "published", "running")
BY_POSITION = tuple(row.attr for row in WORKER if row.labels == POSITION)  # also the names of fields of Load
PREFIX_FETCH_MEMORY_S = 30.0  # a slow prefix fetch is no reason never to try one again


class LoadBoard:
    def __init__(self, replicas: int, epoch: str, state: Callable[[], worker_pb2.LoadSnapshot]) -> None:
        """`state` gives the fields of a snapshot that are of the process and its ranks."""
        self.loads: list[Load] = [Load()] * replicas
        self.changed = Wakeup()
        self.reads = Rate()  # bytes of KV from other workers
        self._prefix_fetches = Rate()  # of fetched prefixes, without the reads of their pages
        self._prefix_fetch_at = -math.inf
        self._state = state
        self.epoch = epoch
        self.duty = worker_pb2.DUTY_UNSPECIFIED
        self._routers: list[str] = []  # that have Links
        self._reported: dict[Counter, float] = {}  # by counter

    def restart(self) -> None:
        """The engines are gone; new ones will count from 0."""
        self.loads = [Load()] * len(self.loads)
        self._reported.clear()
        self.changed.fire()

    def update(self, replica: int, load: Load) -> None:
        if load != self.loads[replica]:
            self.loads[replica] = load
            self.changed.fire()

    def linked(self, routers: list[str]) -> None:
        self._routers = routers
        self.changed.fire()

    def give(self, duty: worker_pb2.Duty) -> None:
        self.duty = duty
        self.changed.fire()

    def fetched(self, seconds: float) -> None:
        """A prefix fetch took so long beside its reads."""
        self._prefix_fetches.add(1, seconds)
        self._prefix_fetch_at = time.monotonic()

    @property
    def prefix_fetch_s(self) -> float:
        """0: unknown, or not measured lately."""
        known = self._prefix_fetches.per_s and time.monotonic() < self._prefix_fetch_at + PREFIX_FETCH_MEMORY_S
        return 1 / self._prefix_fetches.per_s if known else 0.0

    @property
    def idle(self) -> bool:
        """Whether no engine has work, and every page is free or an idle page of the prefix cache."""
        return all(
            not any(getattr(load, name) for name in DOING) and load.pages_free + load.pages_cached == load.pages_total
            for load in self.loads
        )

    def snapshot(self) -> worker_pb2.LoadSnapshot:
        replicas = [convert.wire_load(load) for load in self.loads]
        snapshot = worker_pb2.LoadSnapshot(
            epoch=self.epoch,
            replicas=replicas,
            read_bytes_per_s=self.reads.per_s,
            prefix_fetch_seconds=self.prefix_fetch_s,
            duty=self.duty,
            routers=self._routers,
        )
        snapshot.MergeFrom(self._state())
        return snapshot

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
            metrics.capacity.labels(replica=replica).set(load.capacity)
            for part, seconds in asdict(StepTimes(*load.step_times)).items():
                metrics.step_times.labels(replica=replica, of=part.removesuffix("_s")).set(seconds)
            for name, count in load.counters.items():
                metric, _, label = name.rpartition("/")
                self._advance(getattr(metrics, metric or "engine").labels(replica, label), count)
            for name in BY_POSITION:
                for position, count in enumerate(getattr(load, name), 1):
                    self._advance(getattr(metrics, name).labels(replica, position), count)
            if load.host_pages_total:
                free = load.host_pages_total - load.host_pages_used
                for use, count in (("used", load.host_pages_used), ("free", free)):
                    metrics.host_pages.labels(replica=replica, use=use).set(count)
        if imbalance := self.loads[0].expert_imbalance:
            metrics.expert_imbalance.set(sum(imbalance) / len(imbalance))
            self._advance(metrics.expert_moves, self.loads[0].expert_moves)

    def _advance(self, counter: Counter, count: float) -> None:
        counter.inc(count - self._reported.get(counter, 0))
        self._reported[counter] = count
