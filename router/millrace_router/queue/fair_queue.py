"""The order of waiting tickets: by priority, and within a priority by fair shares of tokens between tenants. Pure.

Each tenant of a priority has `spent`: the tokens it was given there, divided by its weight. The tenant that has spent
the least goes next, its tickets in the order of their arrival; a retry (`paid`) goes before all of its priority.
Late ones go on as another tenant: with a part of the weight, while others wait that are not late.
docs/explanation/admission.md has the reasons.
"""

import heapq
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from millrace_rpc.errors import MillraceError

from millrace_router.policy.choose import Decision
from millrace_router.policy.snapshot import PlacementRequest

LATE = 1 / 8  # of a tenant's weight, for its late tickets while it has others


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a continuation, over all of its attempts. Higher priorities first."""

    priority: int
    arrival: int
    tenant: str = "default"
    weight: float = 1.0
    late: bool = False


@dataclass(slots=True, eq=False)
class Ticket:
    """One wait for workers: either `serve` or `refuse` is called, once, unless the ticket leaves before."""

    place: Place
    want: PlacementRequest
    serve: Callable[[Decision], None]
    refuse: Callable[[MillraceError], None]
    paid: bool = False  # a retry
    late_at: float = math.inf  # by the clock of the queue
    waiting: bool = False
    entered: float = 0.0  # when, by the clock of the queue
    overtaken: int = 0


@dataclass(slots=True)
class _Tenant:
    weight: float
    spent: float  # tokens per weight
    tokens: int = 0  # waiting
    tickets: OrderedDict[int, Ticket] = field(default_factory=OrderedDict)  # by arrival


class _Level:
    """One priority."""

    def __init__(self) -> None:
        self.paid: dict[int, Ticket] = {}
        self.tenants: dict[tuple[str, bool], _Tenant] = {}
        self.reached = 0.0  # the least `spent` of the waiting tenants; never falls
        self.tokens = 0
        self.size = 0

    def tenant(self, place: Place) -> _Tenant:
        found = self.tenants.get((place.tenant, place.late))
        if found is None:
            found = self.tenants[place.tenant, place.late] = _Tenant(place.weight, self.reached)
        others = self.tenants.get((place.tenant, False)) if place.late else None
        found.weight = place.weight * LATE if others and others.tickets else place.weight
        return found

    def add(self, ticket: Ticket) -> None:
        self.size += 1
        self.tokens += ticket.want.tokens
        if ticket.paid:
            self.paid[ticket.place.arrival] = ticket
            return
        tenant = self.tenant(ticket.place)
        if not tenant.tickets:
            tenant.spent = max(tenant.spent, self.reached)
        tenant.tickets[ticket.place.arrival] = ticket
        tenant.tokens += ticket.want.tokens

    def remove(self, ticket: Ticket) -> None:
        self.size -= 1
        self.tokens -= ticket.want.tokens
        if ticket.paid:
            del self.paid[ticket.place.arrival]
            return
        tenant = self.tenants[ticket.place.tenant, ticket.place.late]
        del tenant.tickets[ticket.place.arrival]
        tenant.tokens -= ticket.want.tokens

    def spend(self, place: Place, tokens: int) -> None:
        tenant = self.tenant(place)
        waiting = [other.spent for other in self.tenants.values() if other.tickets]
        self.reached = max(self.reached, min(tenant.spent, *waiting) if waiting else tenant.spent)
        tenant.spent += tokens / tenant.weight
        for name in [n for n, t in self.tenants.items() if not t.tickets and t.spent <= self.reached]:
            del self.tenants[name]  # as good as new

    def in_order(self) -> Iterator[Ticket]:
        """The tickets in the order of service, if all of them could be served."""
        yield from (self.paid[arrival] for arrival in sorted(self.paid))
        waiting = (tenant for tenant in self.tenants.values() if tenant.tickets)
        heads = [(one.spent, next(iter(one.tickets)), one, iter(one.tickets.values())) for one in waiting]
        heapq.heapify(heads)
        while heads:
            spent, first, tenant, tickets = heapq.heappop(heads)
            if (ticket := next(tickets, None)) is not None:
                yield ticket
                heapq.heappush(heads, (spent + ticket.want.tokens / tenant.weight, first, tenant, tickets))


class FairQueue:
    def __init__(self) -> None:
        self._levels: defaultdict[int, _Level] = defaultdict(_Level)

    def __len__(self) -> int:
        return sum(level.size for level in self._levels.values())

    @property
    def tokens(self) -> int:
        """Prompt tokens of all waiting tickets."""
        return sum(level.tokens for level in self._levels.values())

    def add(self, ticket: Ticket) -> None:
        ticket.waiting = True
        self._levels[ticket.place.priority].add(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Remove a ticket that was not served."""
        ticket.waiting = False
        self._levels[ticket.place.priority].remove(ticket)

    def take(self, ticket: Ticket) -> None:
        """Take out a ticket to serve it."""
        self.remove(ticket)
        if not ticket.paid:
            self.charge(ticket.place, ticket.want.tokens)

    def turn_late(self, now: float) -> list[Ticket]:
        """Give the tickets their places that have become late since the last call."""
        tenants = [one for level in self._levels.values() for (_, late), one in level.tenants.items() if not late]
        found = [it for one in tenants for it in itertools.takewhile(lambda t: t.late_at <= now, one.tickets.values())]
        for ticket in found:
            self.remove(ticket)
            ticket.place = replace(ticket.place, late=True)
            self.add(ticket)
        return found

    def charge(self, place: Place, tokens: int) -> None:
        """Add tokens to the tenant's `spent`; a negative number gives back."""
        self._levels[place.priority].spend(place, tokens)

    def in_order(self) -> Iterator[Ticket]:
        """Best first. The queue must not change meanwhile."""
        for priority in sorted(self._levels, reverse=True):
            yield from self._levels[priority].in_order()

    def tokens_before(self, place: Place, tokens: int) -> float:
        """Tokens before a newcomer of so many, if no other ticket arrives: all of higher priorities, and the share of
        each tenant while its own one's are served. Before a late one others of its tenant do arrive, while some wait.
        """
        before = float(sum(level.tokens for priority, level in self._levels.items() if priority > place.priority))
        level = self._levels[place.priority]
        own = level.tenants.get((place.tenant, place.late))
        waiting = own.tokens if own is not None else 0
        start = max(own.spent, level.reached) if own is not None else level.reached
        served_at = start + waiting / (own or place).weight  # what it will have spent when it is the newcomer's turn
        before += waiting + sum(ticket.want.tokens for ticket in level.paid.values())
        for name, tenant in level.tenants.items():
            share = max(served_at - tenant.spent, 0.0) * tenant.weight if tenant is not own else 0.0
            goes_on = tenant.tickets and place.late and name == (place.tenant, False)
            before += share if goes_on else min(tenant.tokens, share)
        return before

    def victims(self, place: Place, newcomers: int, room: int) -> list[Ticket] | None:
        """The tickets that give up their places in a full queue to so many newcomers; None: no room. Those of the
        lowest priority go first, and there the newest of the tenant that holds the most places for its weight; within
        the newcomers' own priority only a tenant that holds more than theirs would.
        """
        found: list[Ticket] = []
        for priority in sorted(p for p in self._levels if p <= place.priority):
            level = self._levels[priority]
            own = level.tenants.get((place.tenant, place.late))
            limit = (len(own.tickets) if own is not None else 0) + newcomers if priority == place.priority else 0
            left = {name: list(tenant.tickets.values()) for name, tenant in level.tenants.items() if tenant.tickets}
            while len(found) < room and left:
                name = max(left, key=lambda name: len(left[name]) / level.tenants[name].weight)
                if len(left[name]) / level.tenants[name].weight <= limit / place.weight:
                    break
                found.append(left[name].pop())
                if not left[name]:
                    del left[name]
        return found if len(found) == room else None
