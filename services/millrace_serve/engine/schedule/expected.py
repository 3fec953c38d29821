"""How long outputs become, learned from those that ended, and the tokens that running ones will need. Pure."""

import bisect
import math
from collections import deque
from collections.abc import Iterable

WINDOW = 256  # outputs that are remembered: lengths have heavy tails, and a change of load is to be seen soon
LEAST = 32  # fewer teach nothing
# Standard deviations of the need that are kept as well. Measured (docs/explanation/engine.md): without any,
# three quarters of the preemptions stay; with 1 a tight pool loses an eighth of its throughput.
MARGIN = 0.5
UNKNOWN = 2048  # tokens that an output is expected to have, while too little is known of outputs


class Outputs:
    """The lengths of the latest outputs, in tokens. `window` 0: nothing is learned."""

    def __init__(self, window: int = WINDOW) -> None:
        self.window = window
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def ended(self, length: int) -> None:
        self._latest.append(length)
        bisect.insort(self._sorted, length)
        if len(self._latest) > self.window:
            del self._sorted[bisect.bisect_left(self._sorted, self._latest.popleft())]

    def rest(self, length: int, number: int) -> int:
        """Tokens that an output of `length` is expected to get still; 0 while too little is known.

        It is a quantile of what came after `length` in the outputs that were longer. `number` (of an arrival) chooses
        the quantile, by the golden ratio: those of successive numbers lie evenly, so that running outputs end one after
        the other, as real ones do. An output that is longer than all others is expected to double.
        """
        total = len(self._sorted)
        if not self._knows:
            return 0
        first = bisect.bisect_right(self._sorted, length)
        if first == total:
            return length
        return self._sorted[first + int(number * 0.6180339887 % 1.0 * (total - first))] - length

    def expected(self, length: int, number: int) -> int:
        """As `rest`; while too little is known, an output is expected to have UNKNOWN tokens, or to double."""
        return self.rest(length, number) if self._knows else max(UNKNOWN - length, length)

    @property
    def mean(self) -> int:
        """Tokens that an output is expected to have of which nothing is there yet."""
        return round(sum(self._sorted) / len(self._sorted)) if self._knows else UNKNOWN

    @property
    def lower_quartile(self) -> int:
        """Tokens that three quarters of the outputs have, or more."""
        return self._sorted[len(self._sorted) // 4] if self._knows else UNKNOWN

    @property
    def _knows(self) -> bool:
        return len(self._sorted) >= LEAST


def need(sequences: Iterable[tuple[int, int]]) -> int:
    """Tokens of KV beyond those in use that the sequences (rest, held) will need, at their highest use of the pool.

    A sequence grows by `rest` tokens, one in each step, then gives these and the `held` ones back.
    """
    ordered = sorted(sequences, reverse=True)
    freed = sum(held for _, held in ordered)
    most = 0
    for count, (rest, held) in enumerate(ordered, start=1):  # when this one ends, those before it still go on
        freed -= held
        most = max(most, count * rest - freed)
    # an output deviates from its expectation by about as much as that is
    deviation = math.sqrt(sum(rest * rest for rest, _ in ordered))
    return most + math.ceil(MARGIN * deviation)


def room(available: int, sequences: Iterable[tuple[int, int]], mean: int) -> int:
    """Tokens that a newcomer may have, an output of `mean` tokens included, where `available` ones are not in use."""
    return available - need([*sequences, (mean, 0)]) + mean
