"""Which workers are far off the others of their role. `judge` is a pure function over their records.

A breaker asks whether a worker fails; this asks whether it does worse than its peers, so it also sees what cannot be
blamed on one side (a transfer has two) and what is slow without failing. What all have in common ejects nobody.

    failing   failure ratio >= median of the others + `failures`
    slow      median first-output time per 1,000 prompt tokens (at least 1,000 are counted) > `slower` x the others'
              median, and by more than `slower_by` seconds

An ejected worker comes back by itself, and stays away longer each time; a window without ejection makes it forget one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from millrace_router.resilience.config import OutlierRules
from millrace_router.resilience.window import Window

OUTCOMES, FAILURES = 0, 1
TIMES = 31  # of the latest first outputs that the median is taken of
UNIT = 1000  # prompt tokens


@dataclass(slots=True)
class Record:
    """What one worker's process did lately."""

    window: Window  # OUTCOMES, FAILURES
    times: deque[float] = field(default_factory=lambda: deque(maxlen=TIMES))
    ejected_until: float = 0.0
    ejections: int = 0

    def spoke(self, seconds: float, prompt_tokens: int, now: float) -> None:
        """Its first output for a request, so long after the request was sent."""
        self.window.add(OUTCOMES, 1, now)
        self.times.append(seconds * UNIT / max(prompt_tokens, UNIT))

    def failed(self, now: float) -> None:
        self.window.add(OUTCOMES, 1, now)
        self.window.add(FAILURES, 1, now)

    def eject(self, rules: OutlierRules, now: float) -> None:
        quiet = math.floor((now - self.ejected_until) / rules.window)  # windows since it came back
        self.ejections = max(self.ejections - quiet, 0) + 1
        self.ejected_until = now + min(rules.pause * self.ejections, rules.longest_pause)
        self.window.clear()  # what it did before has been paid for
        self.times.clear()


def judge(role: Mapping[str, Record], rules: OutlierRules, now: float) -> dict[str, str]:
    """Those of a role's workers to be ejected now, worst first: "failing" or "slow"."""
    room = math.floor(rules.share * len(role)) - sum(now < record.ejected_until for record in role.values())
    judged = {name: r for name, r in role.items() if now >= r.ejected_until and _outcomes(r, now) >= rules.least}
    if room <= 0 or len(judged) < 2:
        return {}
    ratios = {name: record.window.sums(now)[FAILURES] / _outcomes(record, now) for name, record in judged.items()}
    times = {name: median(record.times) for name, record in judged.items() if record.times}
    found: dict[str, tuple[float, str]] = {}
    for name in judged:
        excess = ratios[name] - _others(ratios, name)
        if excess >= rules.failures:
            found[name] = (excess, "failing")
        elif name in times and len(times) > 1:
            usual = _others(times, name)
            if times[name] > max(rules.slower * usual, usual + rules.slower_by):
                found[name] = (0.0, "slow")
    worst = sorted(found, key=lambda name: found[name], reverse=True)
    return {name: found[name][1] for name in worst[:room]}


def _outcomes(record: Record, now: float) -> float:
    return record.window.sums(now)[OUTCOMES]


def _others(values: Mapping[str, float], name: str) -> float:
    return median(value for other, value in values.items() if other != name)
