"""Streams send new tokens in rounds, so that a router that is behind sends larger messages instead of queueing small
ones (docs/router.md#streaming).

1. A stream with news joins the next round, once.
2. A round gives each of its streams a turn, in the order of joining. A turn that wakes a task gets a turn of the event
   loop; of those that write at once as many share one as fit into `SLICE_S`. Other events (outputs, requests, first
   tokens) therefore wait for a few messages, never for the whole round.
3. After it all streams rest for as long as the round took. Tokens that arrive meanwhile become one message per stream.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

LONGEST_REST_S = 0.02
SHORT_S = 0.001  # a round that needs no rest
SLICE_S = 0.0002


Turn = Callable[[], bool]  # whether all is done; else tasks were woken


def rest_s(took_s: float, interval_s: float) -> float:
    """Seconds from the end of a round that took `took_s` to the next one. Rounds begin at least `interval_s` apart."""
    rest = 0.0 if took_s < SHORT_S else min(took_s, LONGEST_REST_S)
    return max(rest, interval_s - took_s)


class Rounds:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, interval_s: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._clock = clock  # uvloop's own counts milliseconds
        self._next: deque[Turn] = deque()
        self._round: deque[Turn] = deque()
        self._began = 0.0
        self._idle = True  # no round, and no rest after one

    def join(self, turn: Turn) -> None:
        """`turn` is called once, in the next round."""
        self._next.append(turn)
        if self._idle:
            self._idle = False
            self._loop.call_soon(self._begin)  # with all that the same step of a worker brings

    def _begin(self) -> None:
        if not self._next:
            self._idle = True
            return
        self._round, self._next = self._next, self._round
        self._began = self._clock()
        self._go_on()

    def _go_on(self) -> None:
        """Give turns. Tasks that are woken run before the next call, so that a round's time includes them."""
        until = self._clock() + SLICE_S
        try:
            while self._round.popleft()() and self._round and self._clock() < until:
                pass
        finally:  # an error in one turn does not stop the others
            self._loop.call_soon(self._go_on if self._round else self._end)

    def _end(self) -> None:
        self._loop.call_later(rest_s(self._clock() - self._began, self._interval_s), self._begin)
