"""The order of the queue: priorities, fair shares, retries, who gives way, and what a newcomer has before it."""

import itertools
import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from millrace_router.policy.snapshot import PlacementRequest
from millrace_router.queue.fair_queue import LATE, FairQueue, Place, Ticket
from millrace_testing.examples import examples

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


class Line:
    """Tickets by name, without workers."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self._arrivals = itertools.count()

    def add(
        self, tenant: str = "a", tokens: int = 10, priority: int = 0, paid: bool = False, late_at: float = math.inf
    ) -> Ticket:
        place = Place(priority, next(self._arrivals), tenant, WEIGHTS.get(tenant, 1.0))
        ticket = Ticket(
            place, PlacementRequest(tokens), serve=lambda _: None, refuse=lambda _: None, paid=paid, late_at=late_at
        )
        self.queue.add(ticket)
        return ticket

    def serve(self) -> Ticket:
        ticket = next(self.queue.in_order())
        self.queue.take(ticket)
        return ticket

    def serve_all(self) -> list[Ticket]:
        return [self.serve() for _ in range(len(self.queue))]


def test_a_retry_goes_before_its_priority_and_costs_nothing() -> None:
    line = Line()
    first, retry, high = line.add("a"), line.add("a", tokens=10_000, paid=True), line.add("b", priority=1)
    assert line.serve_all() == [high, retry, first]
    other, again = line.add("b"), line.add("a")
    assert line.serve_all() == [other, again], "a has spent 10 tokens, b none at this priority"


def test_an_idle_tenant_saves_nothing_up() -> None:
    line = Line()
    for _ in range(100):
        line.add("a")
    for _ in range(90):
        line.serve()
    for _ in range(10):
        line.add("new")
    tenants = [ticket.place.tenant for ticket in line.serve_all()]
    assert tenants.count("a") == tenants.count("new") == 10
    assert abs(tenants[:10].count("a") - tenants[:10].count("new")) <= 2


def test_output_counts_as_well() -> None:
    line = Line()
    for _ in range(10):
        line.add("a", tokens=10)
        line.add("d", tokens=10)
    line.queue.charge(line.serve().place, 30)  # a's first request was answered with 30 tokens
    assert [line.serve().place.tenant for _ in range(5)] == ["d", "d", "d", "d", "a"]


@examples(30)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=120),
    st.integers(1, 120),
)
def test_shares_differ_by_one_ticket_of_each(arrivals: list[tuple[str, int]], served: int) -> None:
    """While two tenants both wait, tokens per weight since the start differ by at most a largest ticket of each."""
    line = Line()
    for tenant, tokens in arrivals:
        line.add(tenant, tokens)
    largest = {t: max([tokens for tenant, tokens in arrivals if tenant == t], default=0) for t in WEIGHTS}
    spent = dict.fromkeys(WEIGHTS, 0.0)
    for _ in range(min(served, len(arrivals))):
        ticket = line.serve()
        spent[ticket.place.tenant] += ticket.want.tokens / WEIGHTS[ticket.place.tenant]
        waiting = {ticket.place.tenant for ticket in line.queue.in_order()}
        for one, two in itertools.combinations(sorted(waiting), 2):
            assert abs(spent[one] - spent[two]) <= largest[one] / WEIGHTS[one] + largest[two] / WEIGHTS[two] + 1e-6


FLOOD = st.tuples(st.sampled_from("ac"), st.integers(1, 50), st.integers(0, 200))  # tenant, prompt, output


@examples(40)
@given(
    st.lists(FLOOD, min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 200), st.integers(0, 9)), min_size=1, max_size=12),
    st.booleans(),
)
def test_a_flood_delays_a_tenant_by_its_share_alone(
    flood: list[tuple[str, int, int]], mine: list[tuple[int, int, int]], high: bool
) -> None:
    """Two tenants always have requests that wait, and their queues never end. Before each request of another one they
    get what it had before, by their weights, and a request more each; however often it goes and comes back. Whoever has
    another priority changes nothing of that, as long as the higher one ends.
    """
    line, answers, flooding = Line(), dict[Ticket, int](), itertools.cycle(flood)
    largest = {t: max([p + o for n, p, o in flood if n == t], default=0) for t in "ac"}

    def refill(tenant: str, prompt: int, output: int) -> None:
        answers[line.add(tenant, prompt)] = output

    def serve() -> Ticket:
        ticket = line.serve()
        line.queue.charge(ticket.place, answers.pop(ticket))
        if ticket.place.tenant != "b":
            refill(*next(flooding))
        return ticket

    for each in flood:
        refill(*each)
    had = 0.0  # by b, for its weight, with its latest request
    for prompt, output, pause in mine:
        for _ in range(pause):
            serve()
        if high:
            answers[line.add("c", 1000, priority=1)] = 0
            assert serve().place.priority == 1
        answers[own := line.add("b", prompt)] = output
        before = dict.fromkeys("ac", 0.0)
        while (ticket := serve()) is not own:
            before[ticket.place.tenant] += ticket.want.tokens
        for tenant, tokens in before.items():
            assert tokens <= had * WEIGHTS[tenant] + len(flood) * largest[tenant] + 1e-6
        had = (prompt + output) / WEIGHTS["b"]


EVENT = st.tuples(
    st.sampled_from(["add", "add", "retry", "serve", "remove", "charge", "late"]),
    st.sampled_from("abc"),
    st.integers(-1, 1),
    st.integers(1, 40),
)


@examples(30)
@given(st.lists(EVENT, max_size=80))
def test_nothing_is_lost(events: list[tuple[str, str, int, int]]) -> None:
    """Everybody leaves once; counts are right; nobody of a lower priority goes first; a tenant's order is arrival."""
    line, waiting = Line(), []
    for event, tenant, priority, tokens in events:
        if event in ("add", "retry"):
            waiting.append(line.add(tenant, tokens, priority, paid=event == "retry", late_at=float(tokens)))
        elif event == "late":
            line.queue.turn_late(float(tokens))
            same = [t for t in reversed(waiting) if t.place.priority == priority and not (t.paid or t.place.late)]
            firsts = {t.place.tenant: t.late_at for t in same}
            assert all(late_at > tokens for late_at in firsts.values())
        elif event == "charge":
            line.queue.charge(Place(priority, 0, tenant, WEIGHTS[tenant]), tokens)
        elif waiting and event == "remove":
            ticket = waiting.pop(tokens % len(waiting))
            line.queue.remove(ticket)
        elif waiting and event == "serve":
            ticket = line.serve()
            waiting.remove(ticket)
            assert ticket.place.priority == max(t.place.priority for t in [ticket, *waiting])
            same = [t for t in waiting if t.place.priority == ticket.place.priority]
            if not ticket.paid:
                assert not any(t.paid for t in same)
                mine = [t for t in same if replace(t.place, arrival=0) == replace(ticket.place, arrival=0)]
                assert ticket.place.late or all(t.place.arrival > ticket.place.arrival for t in mine)
        assert len(line.queue) == len(waiting)
        assert line.queue.tokens == sum(ticket.want.tokens for ticket in waiting)
        order = list(line.queue.in_order())
        assert len(order) == len(waiting) and set(map(id, order)) == set(map(id, waiting))
    assert len(line.serve_all()) == len(waiting) and len(line.queue) == 0


@examples(30)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=60),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(100, 900)), max_size=3),
    st.sampled_from("abc"),
)
def test_the_estimate_for_a_newcomer_is_what_is_served_before_it(
    arrivals: list[tuple[str, int]], retries: list[tuple[str, int]], tenant: str
) -> None:
    """Up to one ticket of each other tenant. Retries go before it in any case."""
    line = Line()
    for name, tokens in arrivals:
        line.add(name, tokens)
    for name, tokens in retries:
        line.add(name, tokens, paid=True)
    estimate = line.queue.tokens_before(Place(0, 10**6, tenant, WEIGHTS[tenant]), 10)
    newcomer, before = line.add(tenant, 10), 0
    while (ticket := line.serve()) is not newcomer:
        before += ticket.want.tokens
    slack = sum(max([tokens for n, tokens in arrivals if n == name], default=0) for name in WEIGHTS)
    assert abs(before - estimate) <= slack + sum(WEIGHTS.values())


def test_the_newest_of_who_holds_most_for_its_weight_gives_way() -> None:
    line = Line()
    a, b = [line.add("a") for _ in range(3)], [line.add("d") for _ in range(2)]
    newcomer = Place(0, 99, "new")
    assert line.queue.victims(newcomer, 1, 1) == [a[2]], "the newest of the one who holds most"
    assert line.queue.victims(newcomer, 1, 3) == [a[2], a[1], b[1]]
    assert line.queue.victims(newcomer, 1, 4) is None, "everybody holds as little as the newcomer would"
    assert line.queue.victims(Place(0, 99, "a"), 1, 1) is None
    assert line.queue.victims(Place(-1, 99, "new"), 1, 1) is None, "nobody of a higher priority gives way"
    assert line.queue.victims(Place(1, 99, "a"), 5, 5) is not None
    line.add("new", paid=True)
    assert line.queue.victims(Place(1, 99, "a"), 6, 6) is None, "a retry stays"
    line = Line()
    _, heavy = [line.add("b") for _ in range(3)], [line.add("c") for _ in range(2)]
    assert line.queue.victims(newcomer, 1, 1) == [heavy[1]], "for half the weight two are more than three for two"


def test_tenants_without_tickets_and_debts_are_forgotten() -> None:
    line = Line()
    for i in range(50):
        line.add(f"tenant {i}")
        line.serve()
    line.add("tenant 0")
    line.serve()  # which had as much as all the others
    assert list(line.queue._levels[0].tenants) == [("tenant 0", False)]


def test_most_others_of_their_tenant_go_before_late_tickets() -> None:
    line = Line()
    late = [line.add("a", late_at=1.0) for _ in range(3)]
    assert line.queue.turn_late(0.9) == [] and line.queue.turn_late(1.0) == late
    others = [line.add(name) for name in 40 * ("a", "d")]
    order = line.serve_all()
    places = [order.index(ticket) for ticket in late]
    assert places == sorted(places) and places[1] - places[0] == places[2] - places[1] == 1 + 2 / LATE
    first = [ticket.place.tenant for ticket in order[: places[2]]]
    assert first.count("a") == (1 + LATE) * first.count("d") and order[-1] is others[-1]
    late = [line.add("b", late_at=1.0) for _ in range(20)]
    assert [line.add("d") for _ in late] and line.queue.turn_late(1.0) == late
    assert sum(it.place.tenant == "b" for it in line.serve_all()[:15]) >= 10, "late ones alone have all of its weight"
