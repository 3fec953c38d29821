"""The record of each worker, and the workers that the policies leave out.

Every sub-request of every attempt reports its first output here, and the failure that the flow blames on its worker.
FAULTS are the failures that count: neither a mistake in the request nor a worker that is full or leaving is one. Of a
failure that either of two workers may have caused none is to blame.

If every routable worker of a role would be left out, none of them is, because then the cause is elsewhere.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from millrace_common.metrics import Metrics
from millrace_common.reasons import Reason

from millrace_router.config import OutlierRules, Resilience
from millrace_router.health.retry_budget import Budget
from millrace_router.policy.snapshot import Replica

log = logging.getLogger(__name__)

FAULTS = frozenset(
    {
        Reason.INTERNAL,
        Reason.WORKER_LOST,
        Reason.STALLED,
        Reason.TRANSFER_FAILED,
        Reason.KV_NOT_FOUND,
        Reason.KV_EXPIRED,
        Reason.KV_MISMATCH,
        Reason.NOT_FINITE,
    }
)
EJECTED = "ejected: failures in a row"
WINDOW_S = 30.0
LONGEST_PAUSE_S = 300.0


@dataclass(slots=True)
class Record:
    """The recent record of one worker's process.

    After its pause an ejected worker gets requests again. Each ejection lasts longer than the one before; each WINDOW_S
    without an ejection lowers the count by one. A worker that comes back and fails before its first success is ejected
    at once.
    """

    in_a_row: int = 0  # failures since the last success
    ejected_until: float = 0.0
    ejections: int = 0

    def failed(self, rules: OutlierRules, now: float) -> bool:
        """A failure for which no other worker can be to blame. Returns whether it ejects the worker."""
        if now < self.ejected_until:  # what was sent before an ejection prolongs no ejection
            return False
        self.in_a_row += 1
        if self.in_a_row < rules.consecutive:
            return False
        quiet = math.floor((now - self.ejected_until) / WINDOW_S)  # windows since the previous ejection ended
        self.ejections = max(self.ejections - quiet, 0) + 1
        self.ejected_until = now + min(rules.pause * self.ejections, LONGEST_PAUSE_S)
        self.in_a_row = rules.consecutive - 1
        return True


class WorkerHealth:
    def __init__(self, rules: Resilience, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = Budget(rules.retries)
        self._rules = rules.outliers
        self._metrics = metrics
        self._clock = clock
        self._records: dict[str, Record] = {}  # by epoch
        self._roles: Mapping[str, str] = {}  # of the same
        self._seen: set[str] = set()  # roles, also those without workers
        self._routable: tuple[frozenset[str], ...] = ()  # epochs of each role
        self._ejected: dict[str, Record] = {}  # by epoch, nearly always empty

    def keep(self, roles: Mapping[str, str], routable: Iterable[frozenset[str]]) -> None:
        """Update the existing processes: epoch to role, and the routable epochs of each role."""
        self._records = {epoch: self._records.get(epoch) or Record() for epoch in roles}
        self._ejected = {epoch: record for epoch, record in self._ejected.items() if epoch in roles}
        self._roles, self._seen = roles, self._seen | set(roles.values())
        self._routable = tuple(routable)

    def ejected(self) -> set[str]:
        """Epochs of the workers to be left out now."""
        now = self._clock()
        self._ejected = {epoch: record for epoch, record in self._ejected.items() if now < record.ejected_until}
        spared = {epoch for role in self._routable if role <= self._ejected.keys() for epoch in role}
        return {epoch for epoch in self._ejected if epoch not in spared}

    def marked(self, replicas: Iterable[Replica]) -> tuple[Replica, ...]:
        """These replicas, with the reason on those of workers to be left out now."""
        if not self._ejected or not (ejected := self.ejected()):
            return tuple(replicas)
        return tuple(replace(one, excluded=EJECTED) if one.epoch in ejected else one for one in replicas)

    def spoke(self, epoch: str) -> None:
        """Record a success: the first output for a request."""
        if (record := self._records.get(epoch)) is not None:
            record.in_a_row = 0

    def failed(self, epochs: Collection[str], reason: Reason) -> None:
        """Record a failed attempt. By the fault of either of two it counts for neither, even if one is gone since."""
        if reason not in FAULTS or len(epochs) != 1:
            return
        [epoch], now = epochs, self._clock()
        if (record := self._records.get(epoch)) is not None and record.failed(self._rules, now):
            self._ejected[epoch] = record
            role, seconds = self._roles[epoch], record.ejected_until - now
            log.warning("%s worker %s is %s (the latest: %s), for %.0f s", role, epoch, EJECTED, reason, seconds)
            self._metrics.ejections.labels(role=role, why="consecutive").inc()

    def report(self) -> None:
        """Bring the gauges up to date, also those of roles whose last worker is gone."""
        now = self._clock()
        ejected = Counter(self._roles[epoch] for epoch, record in self._records.items() if now < record.ejected_until)
        for role in self._seen:
            self._metrics.ejected.labels(role=role).set(ejected[role])
        self._metrics.retries_left.set(self.budget.left(now))
