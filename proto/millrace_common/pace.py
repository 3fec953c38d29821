"""How long somebody who makes progress may be silent before that is a hang. Pure; clocks are passed in.

    limit = max(LEAST_S, TIMES x the slowest recent gap between two signs of progress)

There is none before FEW gaps were seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

LEAST_S = 2.0
TIMES = 20.0
FEW = 8
RECENT = 512  # a gap is remembered for as many gaps at least, and for twice as many at most
TICK_S = 0.1  # between two ticks of a PatientClock


class Slowest:
    """The largest of the recent values; infinite before there are FEW."""

    def __init__(self) -> None:
        self._now = self._before = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        self._now = max(self._now, value)
        self._count += 1
        if self._count == RECENT:
            self._before, self._now, self._count = self._now, 0.0, 0

    @property
    def value(self) -> float:
        return max(self._now, self._before) if self._before or self._count >= FEW else math.inf

    @property
    def limit_s(self) -> float:
        """Of silence, where the values are gaps in seconds."""
        return max(LEAST_S, TIMES * self.value)


class PatientClock:
    """Seconds that its owner has lived through. The owner ticks every TICK_S; however long a pause between two ticks
    was, it counts for two at most. So an owner that was stopped or starved takes no silence for that of others.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lived, self._ticked = 0.0, clock()

    def now(self) -> float:
        return self._lived + min(self._clock() - self._ticked, 2 * TICK_S)

    def tick(self) -> float:
        """Returns `now`."""
        self._lived, self._ticked = self.now(), self._clock()
        return self._lived
