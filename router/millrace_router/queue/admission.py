"""The bounded queue in front of the workers, and the refusal of requests that it cannot serve.

1. `check_room` refuses a request without a place before any work. `make_room` decides once its tokens are known:
   QUEUE_FULL, unless waiting tickets have to give way (fair_queue.py chooses them), or when the wait, estimated from
   the measured rate of service, exceeds what a request may wait; DEADLINE_TOO_SHORT when the client waits for less.
   Before a rate was measured, the least wait counts (first_waits.py), also of those who wait already.
2. `enter` takes a ticket. The first ticket is served at once if a placement exists.
3. `pump` serves in fair order. It is called whenever capacity or workers may have appeared; nothing polls. A ticket
   without a placement does not block the next ones, up to LOOK_AHEAD of them. After some, one worker keeps room for it.
4. `leave` withdraws a ticket (cancel, deadline). `closed` refuses new requests (drain); waiting ones are still served.
   A retried request enters again at its first place, and the queue's size does not refuse it.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from millrace_common.log import survived
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_router.policy.choose import Decision
from millrace_router.policy.snapshot import Pace, PlacementRequest
from millrace_router.queue.fair_queue import FairQueue, Place, Ticket
from millrace_router.queue.first_waits import FirstWaits

log = logging.getLogger(__name__)

KEEP_AFTER = 8  # tickets that have overtaken one, before room is kept for it
LOOK_AHEAD = 8  # tickets that are tried while the first ones find no worker
MEMORY_S = 10.0  # of the measured rate: older services count for less
LEAST_SERVICES = 16  # that are remembered, however rare: several may come at once
UNLIKE = 4.0  # times as long as all that was served lately: the rate says nothing of such a request
LEAST_RETRY_S, LONGEST_RETRY_S = 0.1, 60.0


class ServiceRate:
    """Decayed tokens per second. Time counts only while the queue is not empty: an empty queue does not show the
    capacity, and idle gaps must not erase the estimate. The time until the first service does not count: it shows how
    long a request takes, and not how many end in a second.
    """

    def __init__(self, now: float) -> None:
        self._at = now
        self._tokens = 0.0  # both fade with the same speed
        self._seconds = 0.0  # from the first service until the latest one
        self._since = 0.0  # seconds since then
        self._services = 0
        self._left_s = 0.0  # of measuring
        self._longest = 0.0  # tokens of a request that was served lately

    def advance(self, now: float, waiting: bool) -> None:
        """Advance the clock; `waiting`: the queue was not empty since the last call."""
        passed, self._at = max(now - self._at, 0.0), max(now, self._at)
        self._since += passed if waiting else 0.0

    @property
    def measured(self) -> bool:
        """Of several services, over as long as the first one took: what begins at once may end at once."""
        return self._services > LEAST_SERVICES and self._left_s <= 0

    def resume(self, now: float) -> None:
        """There are workers again: the time without any says nothing of their speed."""
        self._at, self._since = now, 0.0

    def served(self, tokens: int) -> None:
        if tokens > UNLIKE * self._longest:  # the first one, or of another kind: measure anew
            self._services, self._tokens, self._seconds = 1, 0.0, 0.0
            self._left_s, self._since, self._longest = self._since, 0.0, tokens
            return
        self._services += 1
        self._left_s -= self._since
        fade = max(math.exp(-self._since / MEMORY_S), 1 - 1 / LEAST_SERVICES)
        self._tokens, self._longest = self._tokens * fade + tokens, max(self._longest * fade, tokens)
        self._seconds, self._since = self._seconds * fade + self._since, 0.0

    def seconds_for(self, tokens: float, mean: float) -> float | None:
        """Until so many tokens are served; None: unknown. Before the first service it is the time waited so far.
        Requests with a `mean` above all that were served lately count like the longest: they may take no longer.
        """
        seconds = self._seconds + self._since
        if self._services and not self.measured:
            return None
        share = min(1.0, self._longest / mean) if mean else 1.0
        return tokens * share * seconds / self._tokens if self._tokens else seconds or None


class WorkerCapacity(Protocol):
    def choose(self, want: PlacementRequest) -> Decision | None:
        """None: it has to wait. Raises MillraceError where waiting is in vain."""

    def to_keep(self, want: PlacementRequest) -> str:
        """The address of the worker that others must not fill, so that it will have room; empty: none."""

    def pace(self) -> Pace: ...


class Admission:
    def __init__(
        self,
        size: int,
        longest_s: float,  # that a ticket may wait
        places: WorkerCapacity,
        on_size: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size, self._longest_s = size, longest_s
        self._places = places
        self._on_size = on_size
        self._clock = clock
        self._arrivals = itertools.count()
        self._queue = FairQueue()
        self._rate = ServiceRate(clock())
        self._first = FirstWaits(longest_s)  # until the rate is known
        self._pumping = False
        self.closed = False
        self.due = False  # `pump` will be called: what may have appeared is for those who wait already

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def tokens(self) -> int:
        return self._queue.tokens

    def place(self, priority: int, tenant: str = "default", weight: float = 1.0) -> Place:
        return Place(priority, next(self._arrivals), tenant, weight)

    def check_room(self, tickets: int, place: Place) -> None:
        """Refuse a new request before any work is done for it."""
        if self.closed:
            raise MillraceError(Reason.DRAINING, "the router is shutting down")
        over = len(self) + tickets - self._size
        if over > 0 and self._queue.victims(place, tickets, over) is None:
            message = f"the queue is full: {len(self)} requests wait, the limit is {self._size}"
            raise MillraceError(Reason.QUEUE_FULL, message, retry_after_s=self.drained_in())

    def make_room(self, tickets: int, place: Place, tokens: int, left_s: float | None) -> None:
        """Make room for tickets of `tokens` prompt tokens each, whose client waits `left_s` more (None: for ever)."""
        if left_s is not None and left_s <= 0:
            raise MillraceError(Reason.DEADLINE_EXCEEDED, "the deadline had passed before the request could wait")
        self.check_room(tickets, place)
        wait = self.wait_of(place, tokens)
        if left_s is not None and wait is not None and wait > left_s:
            message = f"the wait would be about {wait:.1f} s, but the deadline is in {left_s:.1f} s"
            raise MillraceError(Reason.DEADLINE_TOO_SHORT, message, retry_after_s=_bounded(wait - left_s))
        if wait is not None and wait > self._longest_s:
            raise _too_late(wait, self._longest_s)
        over = len(self) + tickets - self._size
        for victim in (self._queue.victims(place, tickets, over) or ()) if over > 0 else ():
            if not victim.waiting:
                continue  # served, once another had left the places that are looked at
            self.leave(victim)
            message = "the queue is full, and this tenant holds the largest share of it"
            _refuse(victim, MillraceError(Reason.QUEUE_FULL, message, retry_after_s=self.drained_in()))

    def wait_of(self, place: Place, tokens: int) -> float | None:
        """The estimated wait of a newcomer, in seconds. None: unknown. 0 for an empty queue."""
        if not len(self):
            return 0.0
        now, before = self._clock(), self._queue.tokens_before(place, tokens)
        self._rate.advance(now, waiting=True)
        seconds = self._rate.seconds_for(before, self._queue.tokens / len(self))
        if self._rate.measured:
            return seconds
        least, _ = self._first.look(self._queue.in_order(), before, self._places.pace(), now)
        return max(seconds or 0.0, least) or None

    def drained_in(self) -> float | None:
        """Seconds after which a refused client should retry: until the present queue is served. None: unknown."""
        self._rate.advance(self._clock(), waiting=len(self) > 0)
        seconds = self._rate.seconds_for(self._queue.tokens, self._queue.tokens / max(len(self), 1))
        return None if seconds is None else _bounded(seconds)

    def enter(self, ticket: Ticket) -> None:
        ticket.entered = now = self._clock()
        self._rate.advance(now, waiting=len(self) > 0)
        self._queue.add(ticket)
        self._on_size(len(self))
        if not self._pumping and not (self.due and len(self) > 1):  # else the pump comes to it
            self._run(ticket)

    def leave(self, ticket: Ticket) -> None:
        if ticket.waiting:
            self._queue.remove(ticket)
            self._on_size(len(self))
            self.pump()

    def charge(self, place: Place, tokens: int) -> None:
        """Tokens that a request of this place has produced; negative: that it was charged for in vain."""
        self._queue.charge(place, tokens)

    def resume(self) -> None:
        """There are workers again; `pump` comes next."""
        self._rate.resume(self._clock())

    def pump(self) -> None:
        """Serve the tickets for which workers have room. Serving may call this again: the outer call goes on."""
        self.due = False
        if not self._pumping and len(self):
            self._run()
            if len(self):
                self._refuse_late()

    def _refuse_late(self) -> None:
        """Refuse now what would be refused when it has waited for as long as is allowed."""
        now = self._clock()
        turned = self._queue.turn_late(now)
        late: Iterable[tuple[Ticket, float]] = ((it, self.wait_of(it.place, 0) or 0.0) for it in reversed(turned))
        if not self._rate.measured:
            _, late = self._first.look(self._queue.in_order(), math.inf, self._places.pace(), now)
        for ticket, seconds in late:
            left = self._longest_s - (now - ticket.entered)
            if ticket.waiting and seconds > left:
                self._queue.remove(ticket)
                self._on_size(len(self))
                _refuse(ticket, _too_late(seconds, max(left, 0.0)))

    def _run(self, first: Ticket | None = None) -> None:
        self._pumping = True
        try:
            if self._serve_one(first):
                while self._serve_one():
                    pass
        finally:
            self._pumping = False

    def _serve_one(self, only: Ticket | None = None) -> bool:
        """Whether a ticket was served or refused. `only`: the tickets before it have been tried already."""
        now = self._clock()
        before: list[Ticket] = []
        kept = ""
        for ticket in itertools.islice(self._queue.in_order(), LOOK_AHEAD):
            try:
                want = replace(ticket.want, kept=kept) if kept else ticket.want
                decision = self._places.choose(want) if only is None or ticket is only else None
            except Exception as error:  # no worker will ever serve it
                self.leave(ticket)
                _refuse(ticket, error)
                return True
            if decision is not None:
                for other in before:
                    other.overtaken += 1
                self._serve(ticket, decision, now, waited=ticket is not only or len(self) > 1)
                return True
            if ticket is only:
                return False
            before.append(ticket)
            if not kept and ticket.overtaken >= KEEP_AFTER:
                kept = self._places.to_keep(ticket.want)
        return False

    def _serve(self, ticket: Ticket, decision: Decision, now: float, waited: bool) -> None:
        if waited:  # or others do
            self._rate.advance(now, waiting=True)
            self._rate.served(ticket.want.tokens)
        self._first.served(ticket.want, now)
        self._queue.take(ticket)
        self._on_size(len(self))
        try:
            ticket.serve(decision)
        except Exception as error:
            _refuse(ticket, error)


@survived(log, "a request did not take its refusal")
def _refuse(ticket: Ticket, error: Exception) -> None:
    """A fault of ours costs its request alone: whoever called the queue would lose more, and others wait in it."""
    ticket.refuse(MillraceError.of(error, log, "a request could not be placed"))


def _too_late(wait: float, allowed: float) -> MillraceError:
    message = f"the wait would be about {wait:.1f} s; the limit is {allowed:.3g} s"
    return MillraceError(Reason.QUEUE_FULL, message, retry_after_s=_bounded(wait - allowed))


def _bounded(seconds: float) -> float:
    return min(max(seconds, LEAST_RETRY_S), LONGEST_RETRY_S)
