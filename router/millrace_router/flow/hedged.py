"""A continuation that is run a second time, on other workers, when its first token is late: two Generations, and the
hedge (resilience/hedge.py) that says whose tokens count. To its stream it looks like one Generation.

1. The first one starts. 2. `after_s` later nothing has come, workers have it, and the budget has something left: the
   second one starts, if somebody else has room for it at that moment. 3. The first token decides. The loser is
   cancelled, which frees its workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_router.flow.fair_queue import Place
from millrace_router.flow.flow import Flow, Stage
from millrace_router.flow.generation import Backend, Generation, Job
from millrace_router.flow.spans import ContinuationSpans
from millrace_router.resilience.budget import HEDGES
from millrace_router.resilience.hedge import Hedge

Spans = Callable[[], ContinuationSpans]


def prepare(backend: Backend, job: Job, spans: Spans, wake: Callable[[], None]) -> Generation | Hedged:
    after_s = backend.config.resilience.hedge_after
    return Generation(backend, job, spans(), wake) if after_s is None else Hedged(backend, job, spans, wake, after_s)


class Hedged:
    def __init__(self, backend: Backend, job: Job, spans: Spans, wake: Callable[[], None], after_s: float) -> None:
        self.job = job
        self._backend, self._spans, self._wake, self._after_s = backend, spans, wake, after_s
        self._loop = asyncio.get_running_loop()
        self._runs = [Generation(backend, job, spans(), self._look)]
        self._hedge = Hedge([self._runs[0].flow])
        self._timer: asyncio.TimerHandle | None = None

    @property
    def _leader(self) -> Generation:
        return self._runs[self._hedge.leader]

    @property
    def flow(self) -> Flow:
        return self._leader.flow

    @property
    def place(self) -> Place:
        return self._leader.place

    @property
    def stamps(self) -> dict[Stage, float]:
        return self._leader.stamps

    @property
    def tokens_at(self) -> float | None:
        return self._leader.tokens_at

    @property
    def cached_tokens(self) -> int:
        return self._leader.cached_tokens

    def start(self) -> None:
        self._timer = self._loop.call_later(self._after_s, self._late)
        self._runs[0].start()

    def stop(self) -> None:
        self._leader.stop()

    def cancel(self, error: MillraceError) -> None:
        for run in tuple(self._runs):
            run.cancel(error)

    def _late(self) -> None:
        self._timer = None
        if not self._hedge.late:  # it waits in the queue, where a second one would only wait too
            self._timer = self._loop.call_later(self._after_s, self._late)
            return
        budget, now = self._backend.registry.health.budget, self._loop.time()
        if budget.left(now, HEDGES) < 1:
            self._backend.metrics.hedges.labels(outcome="refused").inc()
            return
        second = Generation(self._backend, self.job, self._spans(), self._look, elsewhere=self._runs[0].workers)
        second.start()
        if not second.flow.ended:
            budget.spend(now, HEDGES)
            self._runs.append(second)
            self._hedge.flows.append(second.flow)

    def _look(self) -> None:
        """Something has changed."""
        if self._hedge.look():
            self._decided()
        self._wake()

    def _decided(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        winner = self._leader
        for run in self._runs:
            run.wake = self._wake
            if run is not winner:
                run.cancel(MillraceError(Reason.CANCELLED, "another attempt was faster"))
        if len(self._runs) > 1:
            outcome = "won" if winner is self._runs[1] else "lost"
            self._backend.metrics.hedges.labels(outcome=outcome).inc()
