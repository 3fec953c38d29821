"""Counts of the last seconds, in tenths of the window: old ones go a tenth at a time."""

import math
from collections import deque

SLOTS = 10


class Window:
    """`width` counters. Times never go back."""

    def __init__(self, seconds: float, width: int) -> None:
        self._slot_s = seconds / SLOTS
        self._width = width
        self._slots: deque[tuple[int, list[float]]] = deque(maxlen=SLOTS)

    def add(self, counter: int, amount: float, now: float) -> None:
        slot = math.floor(now / self._slot_s)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, [0.0] * self._width))
        self._slots[-1][1][counter] += amount

    def sums(self, now: float, slots: int = SLOTS) -> list[float]:
        """Of the latest `slots`; the last one is not over yet."""
        first = math.floor(now / self._slot_s) - slots + 1
        counted = [amounts for slot, amounts in self._slots if slot >= first]
        return [sum(amounts[counter] for amounts in counted) for counter in range(self._width)]
