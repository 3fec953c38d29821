import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from millrace_serve.engine.core import KvChunk, RequestId
from millrace_serve.transfer.lease import LeaseEnd, LeaseTable
from millrace_testing.blocks import block
from millrace_testing.examples import examples

A, B = RequestId(7, 0), RequestId(7, 1)
LEASE_S, MAX_LEASE_S = 10.0, 25.0


def chunk(id: RequestId, first_page: int = 0, num_pages: int = 2, last: bool = True) -> KvChunk:
    pages = list(range(first_page, first_page + num_pages))
    return KvChunk(id, first_page, pages, [block(0)] * num_pages, 64 * (first_page + num_pages), last)


class Bench:
    """A table with a clock of its own and the list of what was ended."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ended: list[tuple[RequestId, LeaseEnd]] = []
        self.table = LeaseTable(LEASE_S, MAX_LEASE_S, lambda: self.now, lambda *end: self.ended.append(end))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_deadline_runs_from_the_last_part(bench: Bench) -> None:
    bench.table.publish(chunk(A, 0, 2, last=False))
    bench.wait(1000.0)
    assert bench.table.num_live == 1 and bench.table.next_deadline() is None
    bench.table.publish(chunk(A, 2, 1))
    assert bench.table.next_deadline() == 1010.0
    bench.wait(9.9)
    assert bench.ended == []
    bench.wait(0.1)
    assert bench.ended == [(A, LeaseEnd.EXPIRED)]
    assert not bench.table.release(A)


def test_late_but_not_swept_is_still_held(bench: Bench) -> None:
    bench.table.publish(chunk(A))
    bench.now = 50.0
    assert bench.table.release(A)


def test_renewal_is_bounded(bench: Bench) -> None:
    bench.table.publish(chunk(A))
    for _ in range(2):
        bench.wait(9.0)
        bench.table.renew(A)
    assert bench.table.next_deadline() == 25.0
    bench.wait(7.0)
    assert bench.ended == [(A, LeaseEnd.EXPIRED)]
    bench.table.renew(A)
    assert bench.table.next_deadline() is None and bench.table.num_live == 0


def test_open_lease_is_renewed_without_a_deadline(bench: Bench) -> None:
    """Heartbeats come while the prompt is computed, however long that takes."""
    bench.table.publish(chunk(A, last=False))
    bench.table.renew(A)
    bench.wait(1000.0)
    assert bench.ended == []


class LeaseMachine(RuleBasedStateMachine):
    """Random orders of everything that happens to six leases, against the pages' own view: freed or not."""

    ids = st.builds(RequestId, st.integers(0, 2), st.integers(0, 1))

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.begun: set[RequestId] = set()
        self.freed: dict[RequestId, LeaseEnd] = {}
        self.published_at: dict[RequestId, float] = {}
        self.table = LeaseTable(LEASE_S, MAX_LEASE_S, lambda: self.now, self.on_ended)

    def on_ended(self, id: RequestId, end: LeaseEnd) -> None:
        assert id in self.begun
        assert id not in self.freed, "pages freed twice"
        self.freed[id] = end

    @rule(id=ids, last=st.booleans())
    def publish(self, id: RequestId, last: bool) -> None:
        if id in self.freed or id in self.published_at:
            return  # handover/exports.py publishes nothing of an ended attempt
        self.table.publish(chunk(id, last=last))
        self.begun.add(id)
        if last:
            self.published_at[id] = self.now

    @rule(id=ids)
    def release(self, id: RequestId) -> None:
        freed_before = self.freed.get(id)
        held = id in self.published_at and freed_before is None
        assert self.table.release(id) is held
        end = LeaseEnd.RELEASED if held else LeaseEnd.ABORTED if id in self.begun else None
        assert self.freed.get(id) is (freed_before or end)

    @rule(id=ids)
    def abort(self, id: RequestId) -> None:
        self.table.abort(id)
        assert id in self.freed or id not in self.begun

    @rule(id=ids)
    def renew(self, id: RequestId) -> None:
        self.table.renew(id)

    @rule(seconds=st.floats(0.0, 12.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        self.table.expire()
        deadline = self.table.next_deadline()
        assert deadline is None or deadline > self.now
        for id, at in self.published_at.items():
            assert id in self.freed or self.now < at + MAX_LEASE_S, "a lease outlived its maximum"

    @invariant()
    def begun_and_not_freed_is_live(self) -> None:
        assert self.table.num_live == len(self.begun - set(self.freed))


LeaseMachine.TestCase.settings = examples(20, stateful_step_count=40)
TestLeaseMachine = LeaseMachine.TestCase
