"""The bounded queue in front of the workers: first in, first out within a priority.

1. `enter` takes a ticket. With nobody waiting and a placement at hand it is served at once; a full queue refuses it
   (QUEUE_FULL).
2. `pump` serves from the head while the chooser finds a placement. Called whenever credits or workers may have
   appeared; nothing polls.
3. `leave` withdraws a ticket (cancel, deadline). `close` refuses new tickets (drain); those inside are still served.

A retried request enters again with its first rank, is never refused as over the size, and so overtakes what came
after it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from millrace_rpc.errors import MillraceError, Reason

from millrace_router.policy import Placement, Want


@dataclass(order=True, slots=True)
class Ticket:
    """One continuation's wait for workers, used once: `serve` is called unless the ticket left before."""

    rank: tuple[int, int]  # (-priority, arrival), see Admission.rank
    want: Want = field(compare=False)
    serve: Callable[[Placement], None] = field(compare=False)
    waiting: bool = field(default=False, compare=False)


class Admission:
    def __init__(self, size: int, choose: Callable[[Want], Placement | None], on_size: Callable[[int], None]) -> None:
        self._size = size
        self._choose = choose
        self._on_size = on_size
        self._arrivals = itertools.count()
        self._heap: list[Ticket] = []
        self._waiting = 0  # tickets of the heap that have not left
        self._pumping = False
        self.closed = False

    def __len__(self) -> int:
        return self._waiting

    def rank(self, priority: int) -> tuple[int, int]:
        """A new arrival's place in the order."""
        return -priority, next(self._arrivals)

    def check_room(self, tickets: int) -> None:
        """Refuse a new request before any work is done for it."""
        if self.closed:
            raise MillraceError(Reason.DRAINING, "the router is shutting down")
        if self._waiting + tickets > self._size:
            raise MillraceError(Reason.QUEUE_FULL, f"the queue holds its {self._size} requests already")

    def enter(self, ticket: Ticket) -> None:
        ticket.waiting = True
        heapq.heappush(self._heap, ticket)
        self._resize(+1)
        self.pump()

    def leave(self, ticket: Ticket) -> None:
        if ticket.waiting:
            ticket.waiting = False
            self._resize(-1)
            self.pump()

    def pump(self) -> None:
        """Serve from the head. Serving may call back into the queue: the outer call goes on."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._heap:
                head = self._heap[0]
                if not head.waiting:
                    heapq.heappop(self._heap)
                    continue
                placement = self._choose(head.want)
                if placement is None:
                    return
                heapq.heappop(self._heap)
                head.waiting = False
                self._resize(-1)
                head.serve(placement)
        finally:
            self._pumping = False

    def _resize(self, change: int) -> None:
        self._waiting += change
        self._on_size(self._waiting)
