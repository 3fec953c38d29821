"""All workers of this router, the tasks that keep their connections, and the view from which the policy chooses.

1. A new target becomes a `Worker`; its task starts at once.
2. A target that changes in place (readiness, labels) is handed to its Worker.
3. A target that is gone: its Worker is leaving. It gets no new requests, keeps its Link for the running ones, and ends
   with the last of them, or when the Link fails. It can have the address of its successor.

Values derived from the workers' states (states.py) are computed once per change of a state; the frequent load reports
change only numbers.
"""

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import Callable, Sequence

from millrace.v1 import admin_pb2, worker_pb2
from millrace_common import deployment_secret
from millrace_common.log import survived
from millrace_common.metrics import Metrics
from millrace_common.reasons import Reason
from millrace_rpc.access import token
from millrace_rpc.errors import MillraceError
from millrace_rpc.tls import Identity

from millrace_router.config import RouterConfig
from millrace_router.discovery.base import TROUBLES, Target, diff
from millrace_router.discovery.factory import make_source
from millrace_router.fleet import states
from millrace_router.fleet.cache_feed import CacheFeeds
from millrace_router.fleet.link import DECODE, PREFILL, ROLES, UNIFIED
from millrace_router.fleet.warmups import Warmups
from millrace_router.fleet.worker import Worker
from millrace_router.health.workers import WorkerHealth
from millrace_router.policy.choose import Decision
from millrace_router.policy.placer import Placer
from millrace_router.policy.snapshot import Pace, PlacementRequest, Replica, View

log = logging.getLogger(__name__)


class Registry:
    """A listener of discovery."""

    def __init__(
        self, config: RouterConfig, metrics: Metrics, on_change: Callable[[], None], identity: Identity | None
    ) -> None:
        """`identity`: ours towards the workers; None: plain. Raises OSError when the secret's file is unusable."""
        self._identity = identity
        self.warmups = Warmups(metrics, self._changed)
        self.workers: dict[str, Worker] = {}  # by address
        self._leaving: set[Worker] = set()
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._source = make_source(config.discovery, config.workers)
        self._config = config
        secret = deployment_secret.read(config.secret)
        self._token = token(secret)
        self.cache_salt = functools.partial(deployment_secret.cache_salt, secret)  # of a group of tenants
        key_id = deployment_secret.cache_key_id(secret)
        self._hello = worker_pb2.LinkHello(router_id=secrets.token_hex(8), cache_key_id=key_id)
        self._routable: frozenset[str] = frozenset()  # epochs
        self._able: list[tuple[Worker, frozenset[str]]] = []  # of every model, by address, with their sources' epochs
        self._first: str | None = None  # the revision that is asked first, while there are others
        self.placer = Placer(config, metrics)
        self.health = WorkerHealth(config.resilience, metrics)
        self._feeds = CacheFeeds(self.placer.indexes.kv, metrics)
        self._metrics = metrics
        self._on_change = on_change
        self._model: worker_pb2.WorkerInfo | None = None
        for kind in TROUBLES:
            metrics.discovery_troubles.labels(kind=kind)

    def start(self) -> None:
        self._source.start(self)

    async def stop(self) -> None:
        self.warmups.stop()
        self._feeds.stop()
        await self._source.stop()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def ready(self) -> bool:
        return bool(self._routable)

    @property
    def will_be_ready(self) -> bool:
        """Now, or when the pause of a worker is over: it is worth waiting."""
        return self.ready or any(worker.paused for worker in self.workers.values())

    @property
    def model(self) -> worker_pb2.WorkerInfo:
        """Return the served model, as one of its workers reported it, with the longest context that is served. Raises
        NO_WORKERS before the first report.
        """
        if self._model is None:
            raise MillraceError(Reason.NO_WORKERS, "no worker has come up yet")
        return self._model

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the served model, its own first. Raises NO_WORKERS as `model` does."""
        own = self.model.model
        also = [w.info.model for w in self.workers.values() if w.epoch in self._routable]
        return tuple(dict.fromkeys(name for name in (own, *also, *self._config.aliases) if name))

    def obstacle(self, worker: Worker) -> str:
        """Return why no request goes to this worker; empty when it is routable."""
        if (why := worker.unhealthy or worker.withheld) or worker.epoch in self._routable:
            return why
        if any(worker.epoch in (pair.source, pair.worker) for pair in self.warmups.ready):
            if self._serves(worker):
                return "no worker to pair with is routable"
            name = self.model.model
            other = worker.info.model != name
            return f"{name!r} is served, not its model" if other else f"{name!r} is served with other weights"
        return self.warmups.why_not(worker.epoch)

    @property
    def router_id(self) -> str:
        return self._hello.router_id

    def serving(self) -> list[Worker]:
        """The workers of the served model that requests may be placed on."""
        return [worker for worker, _ in self._able if self._serves(worker)]

    def view(self, weights: str) -> View:
        roles: dict[int, list[Replica]] = {PREFILL: [], DECODE: [], UNIFIED: []}
        for worker, sources in self._able:
            if worker.weights == weights:
                roles[worker.serves_as] += worker.replicas(sources)
        prefill, decode, unified = map(self.health.marked, roles.values())
        return View(prefill, decode, unified, self._first)

    def choose(self, want: PlacementRequest) -> Decision | None:
        """Choose a placement; None: wait. Raises NO_WORKERS when the model that began the answer is gone."""
        served = "" if self._model is None else self._model.layout.model
        weights = want.weights or served
        if weights != served and self.ready and not any(worker.weights == weights for worker, _ in self._able):
            now = "" if self._model is None else self._model.weights_version
            text = f"the model that began this answer is no longer served: weights changed from version {want.version}"
            raise MillraceError(Reason.NO_WORKERS, f"{text} to {now}")
        return self.placer.choose(self.view(weights), want)

    def to_keep(self, want: PlacementRequest) -> str:
        """The worker whose room should be kept for a request that others overtake; empty: none."""
        return self.view(want.weights or self.model.layout.model).roomiest(want)

    def pace(self) -> Pace:
        """Of the workers that generate the outputs of the served model. A report may be older than what was sent."""
        running, fastest = 0, 0.0
        for worker, sources in self._able:
            if worker.role != PREFILL and self._serves(worker):
                replicas = worker.replicas(sources)
                running += max(worker.in_flight, sum(replica.sequences for replica in replicas))
                fastest = max((fastest, *(replica.output_tokens_per_s for replica in replicas)))
        return Pace(running, 1 / fastest if fastest else 0.0)

    def drain(self, worker: Worker) -> None:
        """Send no more requests to the worker's present process."""
        worker.drained_epoch = worker.epoch
        self._changed()

    def status(self) -> list[admin_pb2.WorkerStatus]:
        return [self._status(worker) for worker in (*self.workers.values(), *self._leaving)]

    def _status(self, worker: Worker) -> admin_pb2.WorkerStatus:
        detail, target = self.obstacle(worker), worker.target
        return admin_pb2.WorkerStatus(
            address=worker.address,
            info=worker.info,
            load=worker.load,
            reachable=worker.load is not None,
            healthy=not worker.unhealthy,
            routable=not detail,
            detail=detail,
            in_flight=worker.in_flight,
            key=target.key,
            name=target.name,
            topology={**target.topology, **({"revision": target.revision} if target.revision else {})},
            leaving=worker.leaving,
        )

    def on_targets(self, targets: Sequence[Target]) -> None:
        self._metrics.discovery_synced.set(time.time())
        changes = diff({worker.target.key: worker.target for worker in self.workers.values()}, targets)
        for target in changes.removed:
            worker = self.workers.pop(target.address)
            log.info("%s is no longer listed; %d requests are running there", target, worker.in_flight)
            worker.leaving = True
            self._leaving.add(worker)
        self._release()
        for target in changes.added:
            log.info("discovered %s", target)
            self._add(target)
        for target in changes.updated:
            self.workers[target.address].target = target
        for change in ("removed", "added", "updated"):
            self._metrics.discovery_changes.labels(change=change).inc(len(getattr(changes, change)))
        if changes.removed or changes.added or changes.updated:
            self._changed()

    def on_trouble(self, kind: str) -> None:
        self._metrics.discovery_troubles.labels(kind=kind).inc()

    def _add(self, target: Target) -> None:
        timeouts, metrics = self._config.timeouts, self._metrics
        us = self._identity, self._token
        worker = Worker(target, self._hello, timeouts, metrics, self._changed, self._loaded, *us)
        self.workers[target.address] = worker
        self._tasks[worker] = task = asyncio.create_task(worker.run())
        task.add_done_callback(functools.partial(self._ended, worker))

    def _ended(self, worker: Worker, task: asyncio.Task[None]) -> None:
        self._leaving.discard(worker)
        del self._tasks[worker]

    def _release(self) -> None:
        """End the leaving workers without running requests."""
        for worker in self._leaving:
            task = self._tasks[worker]
            if not worker.in_flight and not task.cancelling():
                task.cancel()

    @survived(log, "the state of the workers could not be derived")  # who calls would end with it: a worker's task
    def _changed(self) -> None:
        """A worker, or a pair, is in another state."""
        workers = self.workers.values()
        self.warmups.reconcile(workers)
        able = states.routable(workers, self.warmups.ready)
        self._model = self._served(able)
        self._routable = frozenset(w.epoch for w in workers if w.epoch in able and self._serves(w))
        sources = states.sources(self.warmups.ready)
        serving = sorted((w for w in workers if w.epoch in able), key=lambda w: w.address)
        self._able = [(worker, sources.get(worker.epoch, frozenset())) for worker in serving]
        self._promise(states.longest(filter(self._serves, serving), sources))
        first = self._config.routing.revision
        self._first = first if any(worker.target.revision != first for worker in serving) else None
        routable = (
            frozenset(w.epoch for w in serving if w.role == role and w.epoch in self._routable) for role in ROLES
        )
        self.health.keep({w.epoch: w.role_name for w in workers if w.epoch}, routable)
        self._feeds.reconcile(workers)
        self.placer.indexes.keep((w.epoch, i) for w in workers if w.link for i in range(w.info.replicas))
        counts = states.count(workers, self._routable)
        for role in states.ROLES:
            for state in states.STATES:
                self._metrics.workers.labels(role=role, state=state).set(counts[role, state])
        self._loaded()

    def _served(self, routable: frozenset[str]) -> worker_pb2.WorkerInfo | None:
        """The model of the revision that is asked first; else the previous one while a worker has it; else another."""
        linked = [worker for worker in self.workers.values() if worker.link is not None]
        able = [worker for worker in linked if worker.epoch in routable] or linked
        first = [worker for worker in able if worker.target.revision == self._config.routing.revision] or able
        same = [worker for worker in first if self._serves(worker)]
        return next((worker.info for worker in same or first), self._model)

    def _promise(self, longest: int) -> None:
        """Show the longest request that some placement serves, not the limit of the worker that reported the model."""
        if self._model is not None and longest and longest != self._model.max_context:
            model = worker_pb2.WorkerInfo()
            model.CopyFrom(self._model)
            model.max_context = longest
            self._model = model

    def _serves(self, worker: Worker) -> bool:
        return self._model is not None and worker.weights == self._model.layout.model

    def _loaded(self) -> None:
        """A worker has reported its load, perhaps because a request has ended."""
        self._release()
        self._on_change()
