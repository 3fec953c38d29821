"""The ejection of workers that fail or are far slower than their peers. `judge` is a pure function over their records.

    consecutive   `consecutive` failures in a row that can be blamed on this worker alone
    failing       failure ratio >= median of the others + `failures`
    slow          median first-output time per 1,000 prompt tokens (at least 1,000 are counted) > `slower` x the others'
                  median, and by more than SLOWER_BY_S

An ejected worker gets requests again after its pause. Each ejection lasts longer than the one before; each window
without an ejection lowers the count by one. A worker that was ejected for failures in a row and fails again before its
first success is ejected at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from millrace_router.config import OutlierRules
from millrace_router.resilience.window import Window

CONSECUTIVE, FAILING, SLOW = "consecutive", "failing", "slow"
WINDOW_S = 30.0
LEAST_OUTCOMES = 10  # in the window, before a worker is compared
SLOWER_BY_S = 1.0  # per 1,000 prompt tokens: below it, a worker that is many times slower is still fast
LONGEST_PAUSE_S = 300.0
OUTCOMES, FAILURES = 0, 1
TIMES = 31  # latest first outputs that the median is taken of
UNIT = 1000  # prompt tokens


@dataclass(slots=True)
class Record:
    """The recent record of one worker's process."""

    window: Window = field(default_factory=lambda: Window(WINDOW_S, 2))  # OUTCOMES, FAILURES
    times: deque[float] = field(default_factory=lambda: deque(maxlen=TIMES))
    in_a_row: int = 0  # failures since the last success
    ejected_until: float = 0.0
    ejections: int = 0
    why: str = ""  # of the latest ejection

    def spoke(self, seconds: float, prompt_tokens: int, now: float) -> None:
        """A success: the first output for a request, so long after the request was sent."""
        self.window.add(OUTCOMES, 1, now)
        self.times.append(seconds * UNIT / max(prompt_tokens, UNIT))
        self.in_a_row = 0

    def failed(self, now: float, alone: bool) -> None:
        """A failure. `alone`: no other worker can be to blame for it."""
        self.window.add(OUTCOMES, 1, now)
        self.window.add(FAILURES, 1, now)
        self.in_a_row += alone and now >= self.ejected_until  # what was sent before an ejection prolongs no ejection

    def eject(self, why: str, rules: OutlierRules, now: float) -> None:
        quiet = math.floor((now - self.ejected_until) / WINDOW_S)  # windows since the previous ejection ended
        self.ejections = max(self.ejections - quiet, 0) + 1
        self.ejected_until = now + min(rules.pause * self.ejections, LONGEST_PAUSE_S)
        self.why = why
        self.in_a_row = min(self.in_a_row, rules.consecutive - 1)
        self.window.clear()  # the ejection answers what the worker did before
        self.times.clear()


def judge(role: Mapping[str, Record], rules: OutlierRules, now: float) -> dict[str, str]:
    """Name to reason of the workers of a role that are to be ejected now."""
    free = {name: record for name, record in role.items() if now >= record.ejected_until}
    found = {name: CONSECUTIVE for name, record in free.items() if record.in_a_row >= rules.consecutive}
    room = math.floor(rules.share * len(role)) - (len(role) - len(free)) - len(found)
    sums = {name: record.window.sums(now) for name, record in free.items() if name not in found}
    compared = [name for name, counts in sums.items() if counts[OUTCOMES] >= LEAST_OUTCOMES]
    if room <= 0 or len(compared) < 2:
        return found
    ratios = {name: sums[name][FAILURES] / sums[name][OUTCOMES] for name in compared}
    times = {name: median(free[name].times) for name in compared if free[name].times}
    far: dict[str, tuple[float, str]] = {}
    for name in compared:
        excess = ratios[name] - _others(ratios, name)
        if excess >= rules.failures:
            far[name] = (excess, FAILING)
        elif name in times and len(times) > 1:
            usual = _others(times, name)
            if times[name] > max(rules.slower * usual, usual + SLOWER_BY_S):
                far[name] = (0.0, SLOW)
    worst = sorted(far, key=lambda name: far[name], reverse=True)
    return found | {name: far[name][1] for name in worst[:room]}


def _others(values: Mapping[str, float], name: str) -> float:
    return median(value for other, value in values.items() if other != name)
