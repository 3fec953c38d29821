"""Counts of the last seconds, in tenths of the window: old ones go a tenth at a time."""

from __future__ import annotations

import math
from collections import deque

SLOTS = 10


class Window:
    """`width` counters. Times never go back."""

    def __init__(self, seconds: float, width: int) -> None:
        self._slot_s = seconds / SLOTS
        self._slots: deque[tuple[int, list[float]]] = deque()
        self._sums = [0.0] * width

    def add(self, counter: int, amount: float, now: float) -> None:
        self._forget(now)
        slot = self._slot(now)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, [0.0] * len(self._sums)))
        self._slots[-1][1][counter] += amount
        self._sums[counter] += amount

    def sums(self, now: float) -> list[float]:
        self._forget(now)
        return list(self._sums)

    def clear(self) -> None:
        self._slots.clear()
        self._sums = [0.0] * len(self._sums)

    def _slot(self, now: float) -> int:
        return math.floor(now / self._slot_s)

    def _forget(self, now: float) -> None:
        first = self._slot(now) - SLOTS + 1
        while self._slots and self._slots[0][0] < first:
            for i, amount in enumerate(self._slots.popleft()[1]):
                self._sums[i] -= amount
