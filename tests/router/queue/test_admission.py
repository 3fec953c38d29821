"""The queue at work: who is refused and what it is told, who is served when workers have room for some only."""

import math
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.reasons import Reason
from millrace_router.policy.choose import Decision
from millrace_router.policy.snapshot import Pace, PlacementRequest
from millrace_router.queue import admission
from millrace_router.queue.admission import KEEP_AFTER, Admission, ServiceRate
from millrace_router.queue.fair_queue import Place, Ticket
from millrace_router.queue.first_waits import FirstWaits
from millrace_rpc.errors import MillraceError
from millrace_testing.examples import examples

PLACE: Decision = object()  # type: ignore[assignment]


class Gate:
    """Placements while `room`, in tokens, is left."""

    def __init__(self, size: int = 100, token_s: float = 0.0) -> None:
        self.room, self.now = 0, 0.0
        self.keeps = ""  # the only worker, once others must not fill it
        self.running, self.token_s = 0, token_s
        self.served: list[object] = []
        self.refused: dict[object, MillraceError] = {}
        self.sizes: list[int] = []
        self.queue = Admission(size, 60.0, self, self.sizes.append, lambda: self.now)

    def choose(self, want: PlacementRequest) -> Decision | None:
        if want.tokens > self.room or want.kept:
            return None
        self.room -= want.tokens
        return PLACE

    def to_keep(self, want: PlacementRequest) -> str:
        return self.keeps

    def pace(self) -> Pace:
        return Pace(self.running, self.token_s)

    def enter(
        self,
        name: object,
        priority: int = 0,
        tokens: int = 1,
        tenant: str = "default",
        place: Place | None = None,
        paid: bool | None = None,
        outputs: int = 2,
        least: int = 0,
        late_at: float = math.inf,
    ) -> Ticket:
        ticket = Ticket(
            place or self.queue.place(priority, tenant),
            PlacementRequest(tokens, outputs, least),
            serve=lambda _: self.served.append(name),
            refuse=lambda error: self.refused.update({name: error}),
            paid=place is not None if paid is None else paid,
            late_at=late_at,
        )
        self.queue.enter(ticket)
        return ticket

    def refusal(
        self, tickets: int = 1, priority: int = 0, tenant: str = "default", left_s: float = 1e9
    ) -> MillraceError:
        with pytest.raises(MillraceError) as caught:
            self.queue.make_room(tickets, self.queue.place(priority, tenant), 1, left_s)
        return caught.value


def paced(served: int, waiting: int, size: int = 100) -> Gate:
    """Requests of 100 tokens, of which two were served per second; so many still wait."""
    gate = Gate(size)
    for i in range(served + waiting):
        gate.enter(i, tokens=100, tenant="a")
    for _ in range(served):
        gate.now, gate.room = gate.now + 0.5, 100
        gate.queue.pump()
    return gate


def test_serving_may_enter_again() -> None:
    """A link that fails at once sends its request back into the queue while the queue serves."""
    gate = Gate()
    gate.room = 2
    place = gate.queue.place(0)
    first = Ticket(place, PlacementRequest(1), lambda _: gate.enter("again", place=place) and None, gate.refused.update)
    gate.queue.enter(first)
    assert gate.served == ["again"] and len(gate.queue) == 0


@pytest.mark.parametrize("where", ["choose", "serve", "refuse"])
def test_a_fault_of_ours_ends_one_request_and_not_the_pump(where: str) -> None:
    """Who calls the pump is a worker's task: the exception would cost the connection, and come again with the next."""
    gate, broken = Gate(), Mock(side_effect=KeyError)
    gate.enter("sick", tokens=7)
    gate.enter("well")
    (sick,) = (ticket for ticket in gate.queue._queue.in_order() if ticket.want.tokens == 7)
    choose = gate.choose
    if where == "serve":
        sick.serve = broken
    else:
        gate.choose = lambda want: broken() if want.tokens == 7 else choose(want)  # type: ignore[method-assign]
    if where == "refuse":
        sick.refuse = broken
    gate.room = 10
    gate.queue.pump()
    assert gate.served == ["well"] and not len(gate.queue)
    assert [error.reason for error in gate.refused.values()] == ([] if where == "refuse" else [Reason.INTERNAL])


# ------------------------------------------------------------------------------------- refusals


def test_a_closed_queue_refuses_and_serves_those_who_wait() -> None:
    gate = Gate()
    gate.enter("waits")
    gate.queue.closed = True
    assert gate.refusal().reason is Reason.DRAINING
    gate.room = 1
    gate.queue.pump()
    assert gate.served == ["waits"]


def test_a_full_queue_says_when_it_will_have_been_served() -> None:
    gate = Gate(size=20)
    for i in range(20):
        gate.enter(i, tokens=100)
    assert gate.refusal().retry_after_s == 1.0, "nothing is known of the workers yet"
    gate = paced(20, 20, size=20)
    error = gate.refusal(tenant="a")
    assert error.reason is Reason.QUEUE_FULL and error.retry_after_s == pytest.approx(10, rel=0.1)
    gate.queue.make_room(1, gate.queue.place(0, "b"), 1, None)
    [victim] = gate.refused.values()
    assert victim.reason is Reason.QUEUE_FULL and victim.retry_after_s == pytest.approx(9.5, rel=0.1)
    gate.enter("b", tenant="b")
    gate.now += 1000  # all workers are gone
    assert gate.refusal(tenant="a").retry_after_s == gate.queue.drained_in() == 60


def test_a_time_without_workers_slows_nothing_down_afterwards() -> None:
    """A pause of all of them, or a roll-out; while it lasts, nobody knows how long it will."""
    gate = paced(20, 20)
    before = gate.queue.drained_in()
    gate.now += 50
    assert gate.queue.drained_in() == pytest.approx(60)
    gate.queue.resume()
    assert gate.queue.drained_in() == pytest.approx(before)


def test_a_deadline_that_would_pass_in_the_queue_says_when_to_come_again() -> None:
    gate = paced(20, 10)
    error = gate.refusal(left_s=3.0, tenant="a")  # ten wait, two are served per second
    assert error.reason is Reason.DEADLINE_TOO_SHORT and error.retry_after_s == pytest.approx(2, abs=0.3)
    gate.queue.make_room(1, gate.queue.place(0, "a"), 1, 6.0)
    gate.queue.make_room(1, gate.queue.place(1, "a"), 1, 0.1)  # nobody of its priority waits
    gate.queue.make_room(1, gate.queue.place(0, "b"), 1, 1.0)  # and b's turn comes soon


def test_no_deadline_is_refused_while_nobody_waits() -> None:
    gate = Gate()
    for _ in range(10):
        gate.now, gate.room = gate.now + 1, 100
        gate.enter("x", tokens=100)
    gate.queue.make_room(1, gate.queue.place(0), 10**6, 0.001)
    assert gate.refusal(left_s=0.0).reason is gate.refusal(left_s=-1.0).reason is Reason.DEADLINE_EXCEEDED


def test_whoever_holds_most_of_a_full_queue_gives_way() -> None:
    gate = Gate(size=4)
    for i in range(4):
        gate.enter(f"a{i}", tenant="a")
    assert gate.refusal(tenant="a").reason is Reason.QUEUE_FULL
    gate.queue.make_room(2, gate.queue.place(0, "b"), 1, None)
    assert list(gate.refused) == ["a3", "a2"] and len(gate.queue) == 2
    assert gate.refused["a3"].reason is Reason.QUEUE_FULL
    gate.enter("b0", tenant="b")
    gate.enter("b1", tenant="b")
    assert gate.refusal(tenant="b").reason is gate.refusal(tenant="a").reason is Reason.QUEUE_FULL
    gate.queue.make_room(1, gate.queue.place(5, "a"), 1, None)
    assert len(gate.refused) == 3, "a higher priority needs no share"


def test_whoever_is_served_while_others_give_way_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "LOOK_AHEAD", 1)
    gate = Gate(size=2)
    gate.room = 1
    for name, weight, tokens in (("big", 0.5, 5), ("small", 1.0, 1)):
        gate.enter(name, tokens=tokens, place=gate.queue.place(0, name, weight), paid=False)
    assert gate.served == [], "the small one is behind a big one, and nobody looks further"
    gate.queue.make_room(2, gate.queue.place(0, "new", 4.0), 1, None)
    assert gate.served == ["small"] and list(gate.refused) == ["big"]


def test_nobody_is_refused_for_ever_because_nothing_has_been_served_yet() -> None:
    gate = Gate()
    gate.enter("first")
    gate.now = 20.0
    gate.queue.make_room(1, gate.queue.place(0), 1, 60.0)
    error = gate.refusal(left_s=10.0)  # what has lasted for 20 s may last for as long again
    assert error.reason is Reason.DEADLINE_TOO_SHORT and error.retry_after_s == pytest.approx(10)


@given(st.floats(0.01, 600), st.integers(1, 100))
def test_a_rate_is_the_same_for_few_and_for_many_services(every_s: float, tokens: int) -> None:
    """Long answers in few places free one of them a minute, short ones hundreds per second."""
    rate = ServiceRate(0.0)
    for i in range(1, 1000):
        rate.advance(i * every_s, waiting=True)
        rate.served(tokens)
    assert rate.seconds_for(7 * tokens, tokens) == pytest.approx(7 * every_s, rel=0.01)
    rate.advance(999 * every_s + 10_000, waiting=False)  # an idle gap
    assert rate.seconds_for(7 * tokens, tokens) == pytest.approx(7 * every_s, rel=0.01)
    rate.advance(1000 * every_s + 10_000, waiting=True)  # just before the next one
    assert 7 * every_s <= rate.seconds_for(7 * tokens, tokens) * 1.01 <= 14.2 * every_s


# ------------------------------------------------------------------------------------- head of line


def test_what_cannot_be_placed_does_not_block_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "LOOK_AHEAD", 3)
    gate = Gate()
    for name, tokens in (("huge", 100), ("big", 50), ("small", 1), ("tiny", 1)):
        gate.enter(name, tokens=tokens)
    gate.room = 1
    gate.queue.pump()
    assert gate.served == ["small"]
    gate.enter("third huge", tokens=100)
    gate.room = 60
    gate.queue.pump()
    assert gate.served == ["small", "big", "tiny"]
    gate.enter("more", tokens=100)
    gate.room = 5
    gate.enter("behind three huge ones")
    gate.queue.pump()
    assert len(gate.served) == 3, "nobody looks further"


def test_a_big_request_is_not_starved_by_small_ones() -> None:
    """Room comes back one by one; small ones would take it for ever. So it is kept once some have overtaken it."""
    gate = Gate()
    gate.keeps = "the only worker"
    gate.enter("big", tokens=10)
    while "big" not in gate.served:
        gate.room += 1
        gate.enter("small")
        gate.queue.pump()
        assert gate.served.count("small") <= KEEP_AFTER
    assert gate.served.count("small") == KEEP_AFTER


# ------------------------------------------------------------------------------------- late ones


def test_in_an_overload_most_are_in_time_and_nobody_waits_in_vain() -> None:
    """Two come in each second and one is served. A late one is refused once it would wait longer than is allowed."""
    gate, waited = Gate(size=1000), dict[int, float]()
    for second in range(600):
        gate.now, gate.room = float(second), 100
        for name in (2 * second, 2 * second + 1):
            gate.enter(name, tokens=100, late_at=second + 4.0)
        gate.queue.pump()
        ends = {int(str(name)): second for name in (*gate.served, *gate.refused)}
        waited = {name: end - name // 2 for name, end in ends.items()} | waited
    steady = [waited[name] for name in waited if name in gate.served and name > 200]
    assert sum(seconds <= 4 for seconds in steady) >= 0.85 * len(steady) and max(steady) <= 60
    assert all(waited[name] <= 5 for name in waited if name in gate.refused) and len(gate.queue) < 30
    assert {error.reason for error in gate.refused.values()} == {Reason.QUEUE_FULL}


@given(st.integers(0, 900), st.sampled_from([0, 1, 512, 8000]), st.floats(0.1, 5), st.floats(0.01, 0.05), st.booleans())
def test_burst_that_ends_in_time_is_answered(num: int, before: int, first_s: float, every_s: float, late: bool) -> None:
    """Workers are full. The first of their requests ends after a while, then many in each second, of any length."""
    gate, sizes = Gate(size=1000), [*[before] * 40, *[512] * num]
    for name, tokens in enumerate(sizes):
        gate.enter(name, tokens=tokens, late_at=1.0 if late else math.inf)
    gate.now = first_s
    for tokens in sizes:
        gate.queue.make_room(1, gate.queue.place(0), 512, None)
        gate.room = tokens
        gate.queue.pump()
        gate.now += every_s
    assert gate.served == list(range(len(sizes))) and not gate.refused


EVENT = st.tuples(st.sampled_from(["enter", "leave", "room", "retry", "refuse"]), st.integers(-2, 2), st.integers(1, 9))


@examples(40)
@given(st.lists(EVENT, max_size=60), st.integers(1, 12))
def test_the_queue_in_random_orders_loses_and_repeats_nobody(events: list[tuple[str, int, int]], size: int) -> None:
    """Nobody is lost, or served twice, or after leaving; new requests never fill more than the size; the size told is
    right.
    """
    gate, waiting, gone = Gate(size), {}, set()
    for i, (event, number, tokens) in enumerate(events):
        if event == "enter":
            try:
                gate.queue.make_room(1, gate.queue.place(number, f"t{tokens % 3}"), tokens, None)
                assert len(gate.queue) < size
                waiting[i] = gate.enter(i, number, tokens, f"t{tokens % 3}")
            except MillraceError as error:
                assert error.reason is Reason.QUEUE_FULL and len(gate.queue) >= size
        elif event == "retry" and gate.served:
            waiting[i] = gate.enter(i, place=gate.queue.place(number), tokens=tokens)
        elif event == "leave" and waiting:
            name = sorted(waiting)[tokens % len(waiting)]
            gate.queue.leave(waiting.pop(name))
            gone.add(name)
        elif event == "room":
            gate.now, gate.room = gate.now + 0.1, tokens
            gate.queue.pump()
        for name in (*gate.served, *gate.refused):
            waiting.pop(name, None)
        assert len(gate.queue) == len(waiting) and gate.sizes[-1:] in ([], [len(waiting)])
        assert len({*gate.served}) == len(gate.served)
        assert not (gone & {*gate.served, *gate.refused}) and not ({*gate.served} & {*gate.refused})
    gate.room = 10**9
    gate.queue.pump()
    assert len(gate.queue) == 0 and set(waiting) <= {*gate.served}


def test_a_wait_beyond_the_limit_is_refused_until_it_is_short_enough() -> None:
    gate = Gate()
    for name in range(25):
        gate.enter(name, tokens=30)
    for _ in range(18):  # 30 tokens in 10 s
        gate.now += 10.0
        gate.room = 30
        gate.queue.pump()
    with pytest.raises(MillraceError) as caught:
        gate.queue.make_room(1, gate.queue.place(0), 30, None)
    assert caught.value.reason is Reason.QUEUE_FULL and "the limit is 60 s" in caught.value.message
    assert caught.value.retry_after_s == pytest.approx(10.0, abs=1.0)


def test_rare_services_are_remembered_all_the_same() -> None:
    """Three at once, each 30 s: the time to come is judged by many of them, not by the last one's share."""
    rate = ServiceRate(0.0)
    for now in range(30, 3000, 30):
        rate.advance(float(now), waiting=True)
        for _ in range(3):
            rate.served(300)
            assert now < 300 or 0.6 * 30 < rate.seconds_for(900, 300) < 2 * 30


def test_a_newcomer_does_not_take_what_appeared_for_those_who_wait() -> None:
    gate = Gate()
    gate.enter("first", tokens=5)
    gate.room, gate.queue.due = 5, True
    gate.enter("second", tokens=5)
    assert gate.served == []
    gate.queue.pump()
    assert gate.served == ["first"] and not gate.queue.due


# ------------------------------------------------------------------------------------- before a rate is known


def burst(gate: Gate, count: int, outputs: int, least: int) -> list[int]:
    """As many requests at once; two of them have room. The indexes of those that are refused before they wait."""
    gate.room, refused = 600, []
    for i in range(count):
        try:
            gate.queue.make_room(1, gate.queue.place(0), 300, None)
        except MillraceError as error:
            assert error.reason is Reason.QUEUE_FULL and error.retry_after_s
            refused.append(i)
        else:
            gate.enter(i, tokens=300, outputs=outputs, least=least)
        gate.running = len(gate.served)
    return refused


def test_a_first_burst_of_known_outputs_is_refused_beyond_the_limit() -> None:
    """36 s for each: those that wait come after 36 s, the next ones would come after 72 s, and 60 s are allowed."""
    gate = Gate(token_s=0.03)
    assert burst(gate, 30, outputs=1200, least=1200) == list(range(4, 30))
    gate.now = 35.0
    gate.queue.pump()
    gate.queue.make_room(1, gate.queue.place(0), 300, None)
    assert gate.served == [0, 1] and not gate.refused and len(gate.queue) == 2, "who was not refused is served"
    gate.now, gate.room = 36.0, 600
    gate.queue.pump()
    assert gate.served == [0, 1, 2, 3]


def test_what_comes_to_wait_for_too_long_is_refused_when_that_is_known() -> None:
    """Nothing is known of the outputs but that none has ended."""
    gate = Gate()
    assert burst(gate, 30, outputs=1200, least=0) == []
    told = {}
    for second in range(1, 60):
        gate.now = float(second)
        gate.queue.pump()
        told |= {name: second for name in gate.refused if name not in told}
    assert [told.get(i) for i in (29, 28, 16, 8, 6, 4)] == [5, 5, 8, 16, 21, 31]
    assert {2, 3}.isdisjoint(told), "they would wait for 59 s, and then their turn may come"


def test_a_short_output_is_not_taken_for_one_as_long_as_what_runs() -> None:
    """Outputs of two tokens take 0.06 s, whatever the running ones have lasted."""
    gate = Gate(token_s=0.03)
    burst(gate, 2, outputs=1200, least=1200)
    for i in range(50):
        gate.queue.make_room(1, gate.queue.place(0), 1, None)
        gate.enter(f"short {i}", tokens=301, outputs=2)
    gate.now = 30.0
    gate.queue.pump()
    assert not gate.refused and len(gate.queue) == 50


def test_requests_of_other_routers_foretell_no_wait() -> None:
    gate = Gate(token_s=0.03)
    burst(gate, 2, outputs=6000, least=6000)
    for running in (0, 3):
        gate.running = running
        gate.queue.make_room(1, gate.queue.place(0), 300, None)
        gate.enter(f"beside {running}", tokens=300)
        gate.queue.pump()
    assert not gate.refused


def test_who_comes_to_wait_for_too_long_hears_what_is_left() -> None:
    """Those that run end after 100 s. A retry has waited before, and is not refused."""
    gate = Gate(token_s=1.0)
    burst(gate, 2, outputs=100, least=100)
    gate.enter("late", tokens=300)
    gate.enter("again", tokens=300, place=gate.queue.place(0))
    gate.now = 30.0
    gate.queue.pump()
    assert list(gate.refused) == ["late"] and gate.sizes[-1] == 1
    error = gate.refused["late"]
    assert error.reason is Reason.QUEUE_FULL and "the limit is 30 s" in error.message
    assert error.retry_after_s == pytest.approx(40), "70 s are left, and it would wait for 30 s more"


@examples(40)
@given(st.lists(st.integers(1, 40), min_size=3, max_size=30), st.integers(1, 4))
def test_nobody_is_refused_whose_turn_would_have_come(seconds: list[int], places: int) -> None:
    """Of places that take one request after the other, whatever the outputs' lengths, while these are known."""
    gate = Gate(token_s=1.0)
    gate.room = places
    refused = set()
    for i, length in enumerate(seconds):
        try:
            gate.queue.make_room(1, gate.queue.place(0), 1, None)
            gate.enter(i, outputs=length, least=length)
        except MillraceError:
            refused.add(i)
        gate.running = len(gate.served)
    gate.queue.pump()
    ends: list[int] = []
    for i, length in enumerate(seconds):
        start = 0 if len(ends) < places else ends.pop(0)
        if i in refused or i in gate.refused:
            assert start > 60
            ends.insert(0, start)
            continue
        assert start <= 60
        ends = sorted([*ends, start + length])


def test_a_number_of_running_requests_makes_no_list() -> None:
    """Workers report it: four billion would take 32 GiB."""
    waits = FirstWaits(60.0)
    waits.served(PlacementRequest(1), 0.0)
    assert waits.look([], 1.0, Pace(2**32 - 1, 0.1), 1.0) == (0.0, [])
