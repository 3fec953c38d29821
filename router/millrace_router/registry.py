"""All workers of this router: a connection task for each, the hooks of their pairs, and the view that the policy
chooses from.

A worker's way to requests: unreachable → reachable (its load stream runs) → ready (it says so) → linked → paired,
warmed, frozen (`hooks.ready`) = routable. Losing any of these takes it out at once; nothing is remembered about the
process before.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable

from millrace.v1 import admin_pb2, worker_pb2
from millrace_rpc.errors import MillraceError, Reason
from millrace_rpc.metrics import Metrics

from millrace_router.config import RouterConfig
from millrace_router.hooks import Hooks
from millrace_router.link import DECODE, PREFILL, UNIFIED
from millrace_router.policy import Chooser, Pair, Placement, View, Want
from millrace_router.worker import Worker

log = logging.getLogger(__name__)


class Registry:
    def __init__(self, config: RouterConfig, metrics: Metrics, on_change: Callable[[], None]) -> None:
        router_id = secrets.token_hex(8)
        self.workers = {
            address: Worker(
                address,
                router_id,
                config.timeouts,
                self._changed,
                lambda kind: metrics.stale.labels(kind=kind).inc(),
            )
            for address in config.workers
        }
        self.hooks = Hooks(config.timeouts, metrics, self._changed)
        self._chooser = Chooser(config.prefill_policy, config.decode_policy)
        self._last: dict[str, tuple[str, int]] = {}
        self._metrics = metrics
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []
        self._model: worker_pb2.WorkerInfo | None = None

    def start(self) -> None:
        self._tasks = [asyncio.create_task(worker.run()) for worker in self.workers.values()]

    async def stop(self) -> None:
        self.hooks.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def ready(self) -> bool:
        return any(not self.obstacle(worker) for worker in self.workers.values())

    @property
    def model(self) -> worker_pb2.WorkerInfo:
        """What the workers serve, as the latest one to come up said. NO_WORKERS before any has."""
        if self._model is None:
            raise MillraceError(Reason.NO_WORKERS, "no worker has come up yet")
        return self._model

    def obstacle(self, worker: Worker) -> str:
        """Why no request goes to this worker; empty when it is routable."""
        if worker.obstacle:
            return worker.obstacle
        if any(worker.epoch in (pair.source, pair.worker) for pair in self.hooks.ready):
            return ""
        troubles = [why for pair, why in self.hooks.trouble.items() if worker.epoch in (pair.source, pair.worker)]
        return "; ".join(troubles) or "no worker of the other role with an equal KV layout"

    def view(self) -> View:
        roles: dict[int, list] = {PREFILL: [], DECODE: [], UNIFIED: []}
        for worker in self.workers.values():
            if not self.obstacle(worker):
                sources = frozenset(pair.source for pair in self.hooks.ready if pair.worker == worker.epoch)
                roles[worker.role] += worker.replicas(sources)
        return View(*(tuple(roles[role]) for role in (PREFILL, DECODE, UNIFIED)))

    def choose(self, want: Want) -> Placement | None:
        placement = self._chooser.choose(self.view(), want, self._last)
        if isinstance(placement, Pair):
            self._last["prefill"] = placement.prefill.key
            if placement.decode is not None:
                self._last["decode"] = placement.decode.key
        elif placement is not None:
            self._last["unified"] = placement.worker.key
        return placement

    def drain(self, worker: Worker) -> None:
        """Send no more requests to the process that this worker is now."""
        worker.drained_epoch = worker.epoch
        self._changed()

    def status(self) -> list[admin_pb2.WorkerStatus]:
        found = []
        for worker in self.workers.values():
            detail = self.obstacle(worker)
            found.append(
                admin_pb2.WorkerStatus(
                    address=worker.address,
                    info=worker.info,
                    load=worker.load,
                    reachable=worker.load is not None,
                    routable=not detail,
                    detail=detail,
                    in_flight=worker.in_flight,
                )
            )
        return found

    def _changed(self) -> None:
        self.hooks.reconcile(self.workers.values())
        linked = [worker.info for worker in self.workers.values() if worker.link is not None]
        if linked:
            self._model = linked[0]
        self._count_workers()
        self._on_change()

    def _count_workers(self) -> None:
        counts = Counter((_role(w), "routable" if not self.obstacle(w) else "waiting") for w in self.workers.values())
        for role in ("prefill", "decode", "unified", "unspecified"):
            for state in ("routable", "waiting"):
                self._metrics.workers.labels(role=role, state=state).set(counts[role, state])


def _role(worker: Worker) -> str:
    return worker_pb2.Role.Name(worker.role).removeprefix("ROLE_").lower()
