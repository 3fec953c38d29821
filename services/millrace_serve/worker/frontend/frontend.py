"""The frontend of a worker behind its servers: one object per process, composed of parts.

Life: 1. `start` brings up the ranks and warms the engines, to READY; 2. requests come over `links`, and reports of the
ranks go to the parts that they concern; weights.py pauses that; 3. `drain` stops admission and lets work end; 4.
`close`. A rank that dies ends 2 and 3 at once: every attempt fails with WORKER_LOST, and `lost` is set for the process
to exit. `leave` begins 3.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from millrace.v1 import worker_pb2
from millrace_common import deployment_secret, loop_lag, tracing
from millrace_common import metrics as catalogue
from millrace_common.gc_hooks import ProcessGc
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError
from millrace_rpc.tls import identity_of
from prometheus_client import CollectorRegistry

from millrace_serve.engine.core import Events, Failure, FlushCache
from millrace_serve.engine.start.phases import Phases
from millrace_serve.engine.start.phases import table as phase_table
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.frontend import warmup
from millrace_serve.worker.frontend.cache_board import CacheBoard
from millrace_serve.worker.frontend.lifecycle import Lifecycle, State
from millrace_serve.worker.frontend.links import Links
from millrace_serve.worker.frontend.load import LoadBoard
from millrace_serve.worker.frontend.profiling import Profiling
from millrace_serve.worker.frontend.ranks import Handler, Ranks
from millrace_serve.worker.frontend.requests import Requests
from millrace_serve.worker.frontend.role import RoleLogic
from millrace_serve.worker.frontend.spans import WorkerSpans
from millrace_serve.worker.frontend.wakeup import together, within
from millrace_serve.worker.launcher import Launcher
from millrace_serve.worker.messages import GcPauses, RankProgress

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
FLUSH_S = 1.0
VERSION_DIGITS = 12  # of a checkpoint's hash


class Frontend:
    def __init__(
        self, config: WorkerConfig, epoch: str, launcher: Launcher, make_role: "Callable[[Frontend], RoleLogic]"
    ) -> None:
        self.config = config
        self.epoch = epoch
        self.registry = CollectorRegistry()
        self.metrics = catalogue.Metrics(catalogue.WORKER + catalogue.PROCESS, self.registry)
        self.metrics.started.set_to_current_time()
        self.identity = identity_of(config.tls, self.metrics)
        self.secret = deployment_secret.read(config.secret)
        self.lifecycle = Lifecycle(self._on_state)
        self.gc = ProcessGc("frontend", self.metrics)
        handlers: dict[type, Handler] = {
            Events: self._on_events,
            RankProgress: lambda rank, report: self.lifecycle.advance(State(report.state), report.message),
            GcPauses: lambda rank, report: self.gc.observe("rank", report.pauses),
        }
        self.ranks = Ranks(config, launcher, handlers, self._on_lost, self._on_stray, self._count_compilations)
        self.board = LoadBoard(config.dp, epoch, self._state)
        self.caches = CacheBoard(config.dp, epoch)
        self.spans = WorkerSpans(tracing.make(config.tracing, f"millrace-{config.role}", epoch))
        self.requests = Requests(config, self.lifecycle, self.ranks, self.spans, self.metrics)
        self.role = make_role(self)
        self.ranks.handlers.update(self.role.handlers)
        self.links = Links(epoch, self.requests, self.role.submit, self.board.linked)
        self.version = ""  # of the weights; empty: the checkpoint's hash stands for it
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.leaving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.state_changed: Callable[[State], None] = lambda state: None
        self._compiled: dict[tuple[int, str], int] = {}  # by rank and library
        self.startup_seconds: dict[str, float] = {}  # by phase
        self.profiling = Profiling(config, epoch, self.ranks)
        self._lag = asyncio.create_task(loop_lag.measure("frontend", self.metrics))

    async def start(self) -> None:
        """Start the worker up to READY. Raises MillraceError when it fails."""
        await self.start_ranks()
        self.lifecycle.to(State.READY)

    async def start_ranks(self, model: Path | None = None) -> None:
        async with within(self.config.timeouts.start, "starting the ranks"):
            await self.ranks.start(model)
        self.lifecycle.advance(State.WARMING, "")
        phases = Phases()
        with phases("warm-up"):
            await self.warm_up()
        self.startup_seconds = {**self.ranks.startup(), **phases.seconds}
        log.info("start-up: %s", phase_table(self.startup_seconds))
        for name, value in self.startup_seconds.items():
            self.metrics.startup.labels(phase=name).set(value)
        self.show_version()

    async def stop_ranks(self) -> None:
        """The worker goes to sleep; `forget` was called."""
        with contextlib.suppress(MillraceError):
            await self.profiling.end()  # the next ranks know nothing of it
        await self.role.disconnect()
        await self.ranks.stop(STOP_GRACE_S)
        self._compiled.clear()
        self.board.report(self.metrics)  # what was counted since the latest scrape
        self.board.restart()
        self.caches.restart()

    async def forget(self, why: str) -> None:
        """End all work and free all cached KV, and become another worker for everybody who knew this one."""
        failure = Failure(Reason.NOT_READY, why)
        for id in self.requests:
            self.requests.fail(id, failure)
        self.role.on_lost(failure)
        async with within(self.config.timeouts.lease, "the end of transfers"):
            while self.role.busy or not self.board.idle:
                await self.board.changed.wait(0.1)  # `busy` has no wake-up of its own
        await self.flush_cache()
        self.epoch = self.board.epoch = self.caches.epoch = self.links.epoch = uuid.uuid4().hex
        self.links.end_all(MillraceError(Reason.NOT_READY, why))

    async def warm_up(self) -> None:
        """Run requests of several shapes on every engine, one after the other and together. Of a worker that is READY,
        and so is warm, one request of a token: it serves, and keeps its prefix cache.
        """
        info, serves = self.ranks.ready_info, self.lifecycle.state is State.READY
        lengths = warmup.prompt_lengths(self.config.limits.resolved(info.num_pages))
        shapes = [(1, 1)] if serves else [(length, concurrent) for length in lengths for concurrent in (1, 4)]
        async with within(self.config.timeouts.warmup, "the warm-up"):
            for length, concurrent in shapes:
                requests = [
                    (replica, warmup.tiny_request(length, info.vocab_size, route))
                    for route in self.role.warmup_routes
                    for replica in range(self.config.dp)
                    for _ in range(min(concurrent, self.config.limits.max_running))
                ]
                await together(*(self.requests.run_own(request, replica) for replica, request in requests))
        if not serves:
            await self.flush_cache()

    async def drain(self, timeout_s: float) -> int:
        """Stop admission, let work end, abort the rest, wait for held pages and transfers. Returns the aborted."""
        if self.lifecycle.state in (State.READY, State.PAUSED):
            timeout_s = timeout_s if self.lifecycle.state is State.READY else 0.0  # what is paused does not end
            self.lifecycle.to(State.DRAINING)
        deadline = time.monotonic() + timeout_s
        while self.requests and (left := deadline - time.monotonic()) > 0:
            await self.requests.changed.wait(left)
        aborted = list(self.requests)
        for id in aborted:
            self.requests.fail(id, Failure(Reason.DRAINING, "the worker drains and this request did not end in time"))
        deadline = max(deadline, time.monotonic() + self.config.timeouts.lease)
        while not (self.board.idle and not self.role.busy) and (left := deadline - time.monotonic()) > 0:
            await self.board.changed.wait(min(left, 0.1))  # `busy` has no wake-up of its own
        return len(aborted)

    def leave(self, why: str) -> None:
        """Have the process drain and exit with an error: it cannot serve as it is, and a new one may."""
        if not self.leaving.done():
            log.error("%s", why)
            self.leaving.set_result(why)

    async def close(self, message: str) -> None:
        """End all Links, then the ranks."""
        if self.lifecycle.state is not State.STOPPED:
            self.lifecycle.to(State.STOPPED, message)
        reason = Reason.WORKER_LOST if self.lost.done() else Reason.DRAINING
        self.links.end_all(MillraceError(reason, message))
        await self.role.close()
        self.profiling.close()
        await self.ranks.stop(STOP_GRACE_S)
        self.gc.close()
        self._lag.cancel()
        await asyncio.to_thread(self.spans.close)

    @property
    def weights_version(self) -> str:
        """Empty before the ranks are up."""
        info = self.ranks.info
        return self.version or ("" if info is None else info.layout.model_hash[:VERSION_DIGITS])

    def show_version(self) -> None:
        self.metrics.weights.clear()
        self.metrics.weights.labels(version=self.weights_version).set(1)

    async def flush_cache(self) -> int:
        """Free the idle pages of the prefix caches. Returns their number when they are free; under load others may be
        cached by then, so the wait is bounded.
        """
        pages = sum(load.pages_cached for load in self.board.loads)
        for replica in range(self.config.dp):
            self.ranks.send(replica, FlushCache())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                while any(load.pages_cached for load in self.board.loads):
                    await self.board.changed.wait()
        return pages

    async def freeze_gc(self) -> tuple[int, int]:
        """Freeze all processes. Returns the number of processes and of frozen objects."""
        objects = [self.gc.freeze(), *await self.ranks.freeze_gc()]
        self.gc.count_freeze("rank", len(objects) - 1, sum(objects[1:]))
        return len(objects), sum(objects)

    def _count_compilations(self, rank: int, compiled: dict[str, int]) -> None:
        """Those for which a request may have waited; before READY none does."""
        for library, count in compiled.items():
            new = count - self._compiled.get((rank, library), 0)
            self._compiled[rank, library] = count
            if self.lifecycle.state is State.READY:
                self.metrics.compilations.labels(library=library).inc(new)

    def _on_stray(self, kind: str) -> None:
        self.requests.count_stale(kind)

    def _on_events(self, rank: int, events: Events) -> None:
        replica = rank // self.config.tp
        self.spans.on_outputs(events.outputs)
        self.role.on_events(replica, events)
        self.requests.deliver(events.outputs)
        self.requests.tell(events.waits)
        if events.cache is not None:
            self.caches.update(replica, events.cache)
        if events.load is not None:
            self.board.update(replica, events.load)

    def _on_lost(self, why: str) -> None:
        self.lost.set_result(why)  # first: the process ends, whatever else may go wrong
        failure = Failure(Reason.WORKER_LOST, why)
        self.requests.fail_all(failure)
        self.role.on_lost(failure)
        self.links.end_all(MillraceError(Reason.WORKER_LOST, why))

    def _state(self) -> worker_pb2.LoadSnapshot:
        state, watch = STATES[self.lifecycle.state], self.ranks.watch
        return worker_pb2.LoadSnapshot(state=state, busy=watch.busy, starved=watch.starved)

    def _on_state(self, state: State) -> None:
        for name in State:
            self.metrics.state.labels(state=name).set(name is state)
        self.board.changed.fire()
        self.state_changed(state)


STATES = {state: worker_pb2.WorkerState.Value(f"WORKER_STATE_{state.name}") for state in State}
