from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from millrace_serve.engine.core import KvPart, RequestId
from millrace_serve.transfer.lease import MOVES, LeaseConfig, LeaseState, LeaseTable, Outcome

A, B = RequestId(7, 0), RequestId(7, 1)
CONFIG = LeaseConfig(lease_s=10.0, max_lease_s=25.0, tombstone_s=100.0, max_tombstones=4)


def part(id: RequestId, first_page: int = 0, num_pages: int = 2, last: bool = True) -> KvPart:
    pages = list(range(first_page, first_page + num_pages))
    return KvPart(id, first_page, pages, [0] * num_pages, 64 * (first_page + num_pages), last)


class Bench:
    """A table with a clock of its own and the list of what was ended."""

    def __init__(self, config: LeaseConfig = CONFIG) -> None:
        self.now = 0.0
        self.ended: list[tuple[RequestId, LeaseState]] = []
        self.table = LeaseTable(config, lambda: self.now, lambda id, state: self.ended.append((id, state)))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_held_once_and_again(bench: Bench) -> None:
    bench.table.publish(part(A, 0, 2, last=False))
    bench.table.publish(part(A, 2, 1))
    assert [bench.table.release(A) for _ in range(3)] == [Outcome.HELD] * 3
    assert bench.ended == [(A, LeaseState.RELEASED)]
    assert bench.table.num_live == 0


def test_the_deadline_runs_from_the_last_part(bench: Bench) -> None:
    bench.table.publish(part(A, 0, 2, last=False))
    bench.wait(1000.0)
    assert bench.table.state(A) is LeaseState.OPEN and bench.table.next_deadline() is None
    bench.table.publish(part(A, 2, 1))
    assert bench.table.next_deadline() == 1010.0
    bench.wait(9.9)
    assert bench.ended == []
    bench.wait(0.1)
    assert bench.ended == [(A, LeaseState.EXPIRED)]
    assert bench.table.release(A) is Outcome.EXPIRED


def test_late_but_not_swept_is_still_held(bench: Bench) -> None:
    bench.table.publish(part(A))
    bench.now = 50.0
    assert bench.table.release(A) is Outcome.HELD


def test_renewal_is_bounded(bench: Bench) -> None:
    bench.table.publish(part(A))
    for _ in range(2):
        bench.wait(9.0)
        assert bench.table.renew(A)
    assert bench.table.next_deadline() == 25.0
    bench.wait(7.0)
    assert bench.ended == [(A, LeaseState.EXPIRED)]
    assert not bench.table.renew(A)


def test_an_attempt_is_not_its_successor(bench: Bench) -> None:
    bench.table.publish(part(A))
    bench.table.abort(A)
    bench.table.publish(part(B))
    assert bench.table.release(A) is Outcome.EXPIRED
    assert bench.table.release(B) is Outcome.HELD


def test_a_part_that_crosses_an_abort_opens_nothing(bench: Bench) -> None:
    """The engine published before it heard of the abort; a lease opened now would never be ended by anybody."""
    bench.table.abort(A)
    assert not bench.table.publish(part(A))
    assert bench.table.release(A) is Outcome.EXPIRED
    assert bench.table.num_live == 0 and bench.ended == []


def test_giving_up_an_open_lease_stops_it(bench: Bench) -> None:
    bench.table.publish(part(A, last=False))
    assert bench.table.release(A) is Outcome.EXPIRED
    assert bench.ended == [(A, LeaseState.ABORTED)]
    assert not bench.table.publish(part(A, 2))


def test_a_complete_lease_takes_no_more_parts(bench: Bench) -> None:
    bench.table.publish(part(A))
    assert not bench.table.publish(part(A, 2))
    assert bench.table.state(A) is LeaseState.PUBLISHED


def test_tombstones_are_bounded_by_count_and_age(bench: Bench) -> None:
    for room in range(10):
        id = RequestId(room, 0)
        bench.table.publish(part(id))
        bench.table.release(id)
    assert len(bench.table._ended) == CONFIG.max_tombstones
    assert bench.table.release(RequestId(0, 0)) is Outcome.UNKNOWN
    assert bench.table.release(RequestId(9, 0)) is Outcome.HELD
    bench.wait(CONFIG.tombstone_s)
    assert len(bench.table._ended) == 0


class LeaseMachine(RuleBasedStateMachine):
    """Random orders of everything that happens to six leases, against the pages' own view: freed or not."""

    ids = st.builds(RequestId, st.integers(0, 2), st.integers(0, 1))

    def __init__(self) -> None:
        super().__init__()
        config = LeaseConfig(lease_s=10.0, max_lease_s=25.0, tombstone_s=1e6, max_tombstones=1000)
        self.now = 0.0
        self.freed: dict[RequestId, LeaseState] = {}
        self.held: set[RequestId] = set()
        self.published_at: dict[RequestId, float] = {}
        self.table = LeaseTable(config, lambda: self.now, self.on_ended)

    def on_ended(self, id: RequestId, state: LeaseState) -> None:
        assert id not in self.freed, "pages freed twice"
        assert state in MOVES.final
        assert id not in self.held
        self.freed[id] = state

    @rule(id=ids, last=st.booleans())
    def publish(self, id: RequestId, last: bool) -> None:
        before = self.table.state(id)
        taken = self.table.publish(part(id, last=last))
        assert taken == (before in (None, LeaseState.OPEN))
        if taken and last:
            self.published_at[id] = self.now

    @rule(id=ids)
    def release(self, id: RequestId) -> None:
        freed_before = self.freed.get(id)
        outcome = self.table.release(id)
        if outcome is Outcome.HELD:
            assert freed_before is None or id in self.held, "HELD for pages that were already reusable"
            assert self.freed[id] is LeaseState.RELEASED
            assert id in self.published_at
            self.held.add(id)
        else:
            assert id not in self.held, "a release that was answered HELD must be answered HELD again"

    @rule(id=ids)
    def abort(self, id: RequestId) -> None:
        self.table.abort(id)
        assert self.table.state(id) in MOVES.final

    @rule(id=ids)
    def renew(self, id: RequestId) -> None:
        assert self.table.renew(id) == (self.table.state(id) in (LeaseState.OPEN, LeaseState.PUBLISHED))

    @rule(seconds=st.floats(0.0, 12.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        self.table.expire()
        deadline = self.table.next_deadline()
        assert deadline is None or deadline > self.now
        for id, at in self.published_at.items():
            assert id in self.freed or self.now < at + 25.0, "a lease outlived its maximum"

    @invariant()
    def freed_means_terminal(self) -> None:
        for id, state in self.freed.items():
            assert self.table.state(id) is state
        live = {id for id in self.published_at if id not in self.freed}
        assert self.table.num_live >= len(live)


LeaseMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase
