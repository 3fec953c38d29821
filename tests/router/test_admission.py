from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_router.admission import Admission, Ticket
from millrace_router.policy import Pair, Replica, Want
from millrace_rpc.errors import MillraceError, Reason

PLACE = Pair(Replica("p", 0, "e", "f", 1, 0, 0), None)


class Gate:
    """Placements for as many as `open`."""

    def __init__(self, size: int = 100) -> None:
        self.open = 0
        self.served: list[object] = []
        self.sizes: list[int] = []
        self.queue = Admission(size, self.choose, self.sizes.append)

    def choose(self, want: Want) -> Pair | None:
        if self.open <= 0:
            return None
        self.open -= 1
        return PLACE

    def enter(self, name: object, priority: int = 0) -> Ticket:
        ticket = Ticket(self.queue.rank(priority), Want(1), lambda _: self.served.append(name))
        self.queue.enter(ticket)
        return ticket


def test_served_at_once_when_there_is_room() -> None:
    gate = Gate()
    gate.open = 1
    gate.enter("a")
    assert gate.served == ["a"] and len(gate.queue) == 0


def test_first_in_first_out_within_priority() -> None:
    gate = Gate()
    for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 1)):
        gate.enter(name, priority)
    gate.open = 3
    gate.queue.pump()
    assert gate.served == ["b", "d", "a"] and len(gate.queue) == 1


def test_full_and_closed() -> None:
    gate = Gate(size=2)
    gate.enter("a")
    gate.queue.check_room(1)
    with pytest.raises(MillraceError) as caught:
        gate.queue.check_room(2)
    assert caught.value.reason is Reason.QUEUE_FULL
    gate.queue.closed = True
    with pytest.raises(MillraceError) as caught:
        gate.queue.check_room(1)
    assert caught.value.reason is Reason.DRAINING


def test_serving_may_enter_again() -> None:
    """A link that fails at once sends its request back into the queue while the queue serves."""
    gate = Gate()
    gate.open = 2
    rank = gate.queue.rank(0)
    again = Ticket(rank, Want(1), lambda _: gate.served.append("again"))
    gate.queue.enter(Ticket(rank, Want(1), lambda _: gate.queue.enter(again)))
    assert gate.served == ["again"] and len(gate.queue) == 0


@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "room"]), st.integers(-2, 2)), max_size=60))
def test_random_orders(events: list[tuple[str, int]]) -> None:
    """Nobody is served twice or after leaving; who is served is always the best of those waiting; the size is right."""
    gate, waiting, left = Gate(), {}, set()
    for i, (event, number) in enumerate(events):
        if event == "enter":
            waiting[i] = gate.enter(i, number)
        elif event == "leave" and waiting:
            name = sorted(waiting)[number % len(waiting)]
            gate.queue.leave(waiting.pop(name))
            left.add(name)
        elif event == "room":
            gate.open += 1
            best = min(waiting, key=lambda name: waiting[name].rank) if waiting else None
            gate.queue.pump()
            if best is not None:
                assert gate.served[-1] == best
        for name in gate.served:
            waiting.pop(name, None)
        assert len(gate.queue) == len(waiting)
        assert len(set(gate.served)) == len(gate.served) and not left & set(gate.served)
    assert gate.sizes[-1:] in ([], [len(waiting)])
