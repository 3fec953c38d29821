"""How the workers have been doing, and whom the policy leaves out for it.

Every leg of every attempt reports here: what it was sent, its first output, and whatever the flow blames on it. Counted
are a worker's own faults, see FAULTS: neither what is wrong with the request, nor that a worker is full or leaving.

What can be blamed on one worker goes to its breaker (breaker.py) and its record; what may be either side's only to both
records, where the outlier is who has it more often than its peers (outliers.py).

Workers are known by the epochs of their processes: a restarted one begins with a clean slate. If all routable workers
of a role would be left out, none is: then it is not the workers, and failing fast would help nobody.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from millrace_common.metrics import Metrics
from millrace_common.reasons import Reason

from millrace_router.fleet.states import ROLES
from millrace_router.resilience.breaker import Breaker, State
from millrace_router.resilience.budget import Budget
from millrace_router.resilience.config import Resilience
from millrace_router.resilience.outliers import Record, judge
from millrace_router.resilience.window import Window

log = logging.getLogger(__name__)

NOBODY: Mapping[str, str] = {}
JUDGE_S = 0.5  # between two looks at the outliers
FAULTS = frozenset(
    {
        Reason.INTERNAL,
        Reason.WORKER_LOST,
        Reason.STALLED,
        Reason.TRANSFER_FAILED,
        Reason.KV_NOT_FOUND,
        Reason.KV_EXPIRED,
        Reason.KV_MISMATCH,
    }
)


@dataclass(frozen=True, slots=True)
class _Worker:
    role: str
    breaker: Breaker
    record: Record


class Health:
    def __init__(self, rules: Resilience, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = Budget(rules.retries)
        self._rules = rules
        self._metrics = metrics
        self._clock = clock
        self._workers: dict[str, _Worker] = {}  # by epoch
        self._routable: tuple[frozenset[str], ...] = ()  # epochs of each role
        self._suspects: set[str] = set()  # breaker not closed, or ejected: nearly always nobody
        self._judged_at = clock()

    def keep(self, roles: Mapping[str, str], routable: Iterable[frozenset[str]]) -> None:
        """The processes that there are: epoch to role, and the routable epochs of each role."""
        for epoch, role in roles.items():
            if epoch not in self._workers:
                record = Record(Window(self._rules.outliers.window, 2))
                self._workers[epoch] = _Worker(role, Breaker(self._rules.breaker), record)
        for epoch in self._workers.keys() - roles.keys():
            del self._workers[epoch]
        self._suspects &= roles.keys()
        self._routable = tuple(routable)

    def left_out(self) -> Mapping[str, str]:
        """Epochs of those to be left out now, and why."""
        if not self._suspects:
            return NOBODY
        found = {epoch: why for epoch in tuple(self._suspects) if (why := self._why_not(epoch))}
        for role in self._routable:
            if role and role <= found.keys():
                for epoch in role:
                    del found[epoch]
        return found

    # ------------------------------------------------------------------------------------- what legs report

    def sent(self, epoch: str) -> None:
        if epoch in self._suspects:
            self._workers[epoch].breaker.sent(self._clock())

    def spoke(self, epoch: str, seconds: float, prompt_tokens: int) -> None:
        """The first output for a request that was sent so long ago."""
        if (worker := self._workers.get(epoch)) is not None:
            now = self._clock()
            worker.record.spoke(seconds, prompt_tokens, now)
            before = worker.breaker.state
            worker.breaker.succeeded(now)
            self._moved(epoch, worker, before)
            if now >= self._judged_at + JUDGE_S:
                self._judge(now)

    def failed(self, epochs: Iterable[str], reason: Reason) -> None:
        """An attempt failed, which is blamed on one worker or on either of two."""
        if reason not in FAULTS:
            return
        now = self._clock()
        blamed = [(epoch, self._workers[epoch]) for epoch in epochs if epoch in self._workers]
        for epoch, worker in blamed:
            worker.record.failed(now)
            if len(blamed) == 1:
                before = worker.breaker.state
                worker.breaker.failed(now)
                self._moved(epoch, worker, before)
        self._judge(now)

    # ------------------------------------------------------------------------------------- for operators

    def report(self) -> None:
        """Bring the gauges up to date, also those of roles whose last worker is gone."""
        now = self._clock()
        states = Counter((worker.role, worker.breaker.state) for worker in self._workers.values())
        ejected = Counter(w.role for w in self._workers.values() if now < w.record.ejected_until)
        for role in ROLES:
            self._metrics.ejected.labels(role=role).set(ejected[role])
            for state in State:
                self._metrics.breakers.labels(role=role, state=state).set(states[role, state])
        self._metrics.retries_left.set(self.budget.left(now))

    # ------------------------------------------------------------------------------------- inside

    def _why_not(self, epoch: str) -> str:
        worker, now = self._workers[epoch], self._clock()
        before = worker.breaker.state
        why = worker.breaker.why_not(now)
        self._moved(epoch, worker, before)
        if now < worker.record.ejected_until:
            return why or "ejected: far off the others of its role"
        if worker.breaker.state is State.CLOSED:
            self._suspects.discard(epoch)
        return why

    def _moved(self, epoch: str, worker: _Worker, before: State) -> None:
        state = worker.breaker.state
        if state is not before:
            log.warning("the circuit breaker of %s worker %s is %s", worker.role, epoch, state)
            self._metrics.breaker_transitions.labels(role=worker.role, state=state).inc()
            self._suspects.add(epoch)

    def _judge(self, now: float) -> None:
        self._judged_at = now
        for role in {worker.role for worker in self._workers.values()}:
            records = {epoch: worker.record for epoch, worker in self._workers.items() if worker.role == role}
            for epoch, why in judge(records, self._rules.outliers, now).items():
                records[epoch].eject(self._rules.outliers, now)
                self._suspects.add(epoch)
                until = records[epoch].ejected_until
                log.warning("%s worker %s is ejected for %.0f s: %s", role, epoch, until - now, why)
                self._metrics.ejections.labels(role=role, why=why).inc()
