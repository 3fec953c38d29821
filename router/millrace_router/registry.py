"""All workers of this router: who is discovered (fleet.py), the hooks of their pairs, and the view that the policy
chooses from.

What is derived from the workers' states (states.py) is computed once per change of a state: load reports, of which
there are many, change only numbers.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from millrace.v1 import admin_pb2, worker_pb2
from millrace_rpc.errors import MillraceError, Reason
from millrace_rpc.metrics import Metrics
from millrace_rpc.tls import Identity

from millrace_router import states
from millrace_router.cache_feed import CacheFeeds
from millrace_router.config import RouterConfig
from millrace_router.discovery.base import Target
from millrace_router.discovery.factory import make_source
from millrace_router.fleet import Fleet
from millrace_router.hooks import Hooks
from millrace_router.link import DECODE, PREFILL, UNIFIED
from millrace_router.policy import Placement, Placer, View, Want
from millrace_router.resilience.health import Health
from millrace_router.worker import Worker

log = logging.getLogger(__name__)


class Registry:
    def __init__(
        self,
        config: RouterConfig,
        metrics: Metrics,
        on_change: Callable[[], None],
        identity: Identity | None = None,
    ) -> None:
        """`identity`: ours towards the workers; None: plain."""
        self._identity = identity
        self.hooks = Hooks(config.timeouts, metrics, self._changed)
        self._fleet = Fleet(make_source(config.found_by), self._make_worker, metrics, self._changed)
        self.workers = self._fleet.workers  # by address
        self._config = config
        self._router_id = secrets.token_hex(8)
        self._routable: frozenset[str] = frozenset()  # epochs
        self._serving: list[tuple[Worker, frozenset[str]]] = []  # routable ones by address, with their sources' epochs
        self.placer = Placer(config, metrics)
        self.health = Health(config.resilience, metrics)
        self._feeds = CacheFeeds(self.placer.indexes.kv, metrics)
        self._metrics = metrics
        self._on_change = on_change
        self._model: worker_pb2.WorkerInfo | None = None

    def start(self) -> None:
        self._fleet.start()

    async def stop(self) -> None:
        self.hooks.stop()
        self._feeds.stop()
        await self._fleet.stop()

    @property
    def ready(self) -> bool:
        return bool(self._routable)

    @property
    def model(self) -> worker_pb2.WorkerInfo:
        """What is served, as one of its workers said. NO_WORKERS before any has."""
        if self._model is None:
            raise MillraceError(Reason.NO_WORKERS, "no worker has come up yet")
        return self._model

    def obstacle(self, worker: Worker) -> str:
        """Why no request goes to this worker; empty when it is routable."""
        if (why := worker.unhealthy or worker.withheld) or worker.epoch in self._routable:
            return why
        if any(worker.epoch in (pair.source, pair.worker) for pair in self.hooks.ready):
            return (
                "no partner of it is routable"
                if self._serves(worker)
                else f"{self.model.model!r} is served, not its model"
            )
        return self.hooks.why_not(worker.epoch)

    def view(self) -> View:
        roles: dict[int, list] = {PREFILL: [], DECODE: [], UNIFIED: []}
        left_out = self.health.left_out()
        for worker, sources in self._serving:
            roles[worker.role] += worker.replicas(sources, left_out.get(worker.epoch, ""))
        return View(*(tuple(roles[role]) for role in (PREFILL, DECODE, UNIFIED)))

    def choose(self, want: Want) -> Placement | None:
        return self.placer.choose(self.view(), want)

    def drain(self, worker: Worker) -> None:
        """Send no more requests to the process that this worker is now."""
        worker.drained_epoch = worker.epoch
        self._changed()

    def status(self) -> list[admin_pb2.WorkerStatus]:
        return [self._status(worker) for worker in (*self.workers.values(), *self._fleet.leaving)]

    def _status(self, worker: Worker) -> admin_pb2.WorkerStatus:
        detail = self.obstacle(worker)
        return admin_pb2.WorkerStatus(
            address=worker.address,
            info=worker.info,
            load=worker.load,
            reachable=worker.load is not None,
            healthy=not worker.unhealthy,
            routable=not detail,
            detail=detail,
            in_flight=worker.in_flight,
            key=worker.target.key,
            name=worker.target.name,
            topology=worker.target.topology,
            leaving=worker.leaving,
        )

    def _make_worker(self, target: Target) -> Worker:
        def on_stale(kind: str) -> None:
            self._metrics.stale.labels(kind=kind).inc()

        return Worker(
            target, self._router_id, self._config.timeouts, self._changed, self._loaded, on_stale, self._identity
        )

    def _changed(self) -> None:
        """A worker, or a pair, is in another state."""
        workers = self.workers.values()
        self.hooks.reconcile(workers)
        seen = [worker.seen for worker in workers]
        able = states.routable(seen, self.hooks.ready)
        self._model = self._served(able)
        self._routable = frozenset(w.epoch for w in workers if w.epoch in able and self._serves(w))
        sources = states.sources(self.hooks.ready)
        serving = sorted((w for w in workers if w.epoch in self._routable), key=lambda w: w.address)
        self._serving = [(worker, sources.get(worker.epoch, frozenset())) for worker in serving]
        routable = (frozenset(w.epoch for w in serving if w.role == role) for role in (PREFILL, DECODE, UNIFIED))
        self.health.keep({one.epoch: one.role for one in seen if one.epoch}, routable)
        self._feeds.reconcile(workers)
        self.placer.indexes.keep((w.epoch, i) for w in workers if w.link for i in range(w.info.replicas))
        counts = states.count(seen, self._routable)
        for role in states.ROLES:
            for state in states.STATES:
                self._metrics.workers.labels(role=role, state=state).set(counts[role, state])
        self._loaded()

    def _served(self, routable: frozenset[str]) -> worker_pb2.WorkerInfo | None:
        """One model at a time: that of before for as long as a worker can serve it, then another one's."""
        linked = [worker for worker in self.workers.values() if worker.link is not None]
        able = [worker for worker in linked if worker.epoch in routable] or linked
        same = [worker for worker in able if self._serves(worker)]
        return next((worker.info for worker in same or able), self._model)

    def _serves(self, worker: Worker) -> bool:
        return self._model is not None and worker.info.model == self._model.model

    def _loaded(self) -> None:
        """A worker has reported its load."""
        self._fleet.release()
        self._on_change()
