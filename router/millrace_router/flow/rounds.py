"""Streams send new tokens in rounds, so that a router that is behind sends larger messages instead of queueing small
ones (docs/explanation/streaming.md).

1. A stream with news joins the next round, once.
2. A round gives each of its streams a turn, in the order of joining. A turn that wakes a task gets a turn of the event
   loop; of those that write at once as many share one as fit into `SLICE_S`. Other events (outputs, requests, first
   tokens) therefore wait for a few messages, never for the whole round.
3. A stream that gets more news before its turn shows that the router is behind. After a round all streams rest: for as
   long as it took if all of them were behind, not at all if none was. Tokens that arrive meanwhile become one message
   per stream, which costs as much as one token.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

LONGEST_FLUSH_DELAY_S = 0.02
SLICE_S = 0.0002


Turn = Callable[[], bool]  # whether all is done; else tasks were woken


def flush_delay_s(took_s: float, behind: float, interval_s: float) -> float:
    """Seconds from the end of a round that took `took_s` to the next one. Rounds begin at least `interval_s` apart.

    Args:
        behind: share of the streams that got more news before their turn, 0 to 1.
    """
    return max(min(took_s, LONGEST_FLUSH_DELAY_S) * behind, interval_s - took_s)


class Rounds:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, interval_s: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._clock = clock  # uvloop's own counts milliseconds
        self._next: deque[Turn] = deque()
        self._round: deque[Turn] = deque()
        self._began, self._turns = 0.0, 0
        self._waited = 0  # news of streams that waited for their turn, since the last round ended
        self._idle = True  # no round, and no rest after one

    def join(self, turn: Turn) -> None:
        """`turn` is called once, in the next round."""
        self._next.append(turn)
        if self._idle:
            self._idle = False
            self._loop.call_soon(self._begin)  # with all that the same step of a worker brings

    def wait(self) -> None:
        """A stream that has joined, and has not had its turn, has more news."""
        self._waited += 1

    def _begin(self) -> None:
        if not self._next:
            self._idle = True
            return
        self._round, self._next = self._next, self._round
        self._began, self._turns = self._clock(), len(self._round)
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
        behind, self._waited = min(self._waited / self._turns, 1.0), 0
        self._loop.call_later(flush_delay_s(self._clock() - self._began, behind, self._interval_s), self._begin)
