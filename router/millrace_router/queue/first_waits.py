"""How long requests wait at least, while the queue has hardly shown its rate: in the first burst. Pure.

The workers are full while requests wait. So the requests that were served last still run, and each waiting request
takes the place of one that ends. A request lasts at least as long as the outputs that it gets in any case, and an
output of unknown length at least as long as all running outputs have lasted already.
"""

import heapq
from collections import deque
from collections.abc import Iterable

from millrace_router.policy.snapshot import Pace, PlacementRequest
from millrace_router.queue.fair_queue import Ticket

MOST_RUNNING = 4096  # requests whose beginnings are remembered


class FirstWaits:
    def __init__(self, longest_s: float) -> None:
        """`longest_s`: that a request may wait."""
        self._longest_s = longest_s
        self._begun: deque[tuple[float, PlacementRequest]] = deque(maxlen=MOST_RUNNING)

    def served(self, want: PlacementRequest, now: float) -> None:
        self._begun.append((now, want))

    def look(
        self, waiting: Iterable[Ticket], before: float, pace: Pace, now: float
    ) -> tuple[float, list[tuple[Ticket, float]]]:
        """The seconds that a newcomer waits behind the first `before` prompt tokens of `waiting`, and the tickets among
        these that will have waited for longer than is allowed, with the seconds that they have to wait still.
        """
        begun = list(self._begun)[-pace.running :] if pace.running else []
        if not begun:
            return 0.0, []
        lasted = now - begun[-1][0]

        def seconds(want: PlacementRequest) -> float:
            return max(want.least * pace.token_s, min(lasted, want.outputs * pace.token_s or lasted))

        # Of requests that other routers have sent nothing is known, and more of them than can wait here say no more.
        ends = [now] * min(pace.running - len(begun), MOST_RUNNING) + [
            max(at + seconds(want), now) for at, want in begun
        ]
        heapq.heapify(ends)
        late = []
        for ticket in waiting:
            if before <= 0:
                break
            before -= ticket.want.tokens
            if not ticket.paid and ends[0] - ticket.entered > self._longest_s:
                late.append((ticket, ends[0] - now))
            else:
                heapq.heapreplace(ends, ends[0] + seconds(ticket.want))
        return ends[0] - now, late
