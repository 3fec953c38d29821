from __future__ import annotations

import numpy as np
import pytest
from millrace_serve.transfer.base import MemoryHandle, ReadState, TransferError
from millrace_testing.faulty_transfer import Fault, FaultPlan, FaultySink
from millrace_testing.local_transfer import LocalFabric, LocalSink, LocalSource
from transfer.pools import POISON, Pool, finish


class Pair:
    def __init__(self, plan: FaultPlan) -> None:
        self.theirs, self.ours = Pool(16, 256, seed=1), Pool(16, 256)
        self.fabric = LocalFabric()
        self.inner = LocalSink(self.fabric, self.ours.buffer)
        self.sink = FaultySink(self.inner, self.ours.buffer, plan)
        self.source = self.exporter()

    def exporter(self) -> MemoryHandle:
        handle = LocalSource(self.fabric, self.theirs.buffer).handle()
        self.sink.connect(handle)
        return handle

    def arrived(self, page: int) -> bool:
        return np.array_equal(self.ours.pages[page], self.theirs.pages[page])


def polls_until_final(plan: FaultPlan) -> int:
    pair = Pair(plan)
    op = pair.sink.read(pair.source, [3], [3])
    polls = 1
    while op.poll() is ReadState.PENDING:
        polls += 1
    assert op.poll() is ReadState.DONE and pair.arrived(3)
    return polls


def test_late_faults_complete_correctly() -> None:
    assert polls_until_final(FaultPlan()) == 1
    assert 1 < polls_until_final(FaultPlan(at={0: Fault.DELAY}, max_polls=8)) <= 9
    assert polls_until_final(FaultPlan(at={0: Fault.STALL}, stall_polls=50)) == 51
    assert polls_until_final(FaultPlan(at={0: Fault.REORDER}, max_polls=8)) == 9
    assert polls_until_final(FaultPlan(at={0: Fault.DUPLICATE})) == 1


def test_reorder_completes_after_a_later_read() -> None:
    pair = Pair(FaultPlan(at={0: Fault.REORDER}))
    early, late = (pair.sink.read(pair.source, [page], [page]) for page in (1, 2))
    assert early.poll() is ReadState.PENDING
    assert late.poll() is ReadState.DONE
    assert early.poll() is ReadState.DONE


def test_a_dropped_read_ends_with_its_peer() -> None:
    pair = Pair(FaultPlan(at={0: Fault.DROP}))
    op = pair.sink.read(pair.source, [3], [3])
    assert [op.poll() for _ in range(1000)] == [ReadState.PENDING] * 1000
    pair.sink.disconnect("somebody-else")
    assert op.poll() is ReadState.PENDING
    pair.sink.disconnect(pair.source.agent)
    assert op.poll() is ReadState.FAILED and "was disconnected" in op.error


def test_close_ends_a_dropped_read() -> None:
    pair = Pair(FaultPlan(at={0: Fault.DROP}))
    op = pair.sink.read(pair.source, [3], [3])
    pair.sink.close()
    assert op.poll() is ReadState.FAILED


def test_corruption_is_silent() -> None:
    pair = Pair(FaultPlan(at={0: Fault.CORRUPT}))
    op = pair.sink.read(pair.source, [3, 4], [3, 4])
    assert finish(op) is ReadState.DONE and op.error == ""
    flipped = (pair.ours.pages != pair.theirs.pages)[3:5]
    assert flipped.sum(axis=1).tolist() == [1, 1]
    assert (np.delete(pair.ours.pages, [3, 4], axis=0) == POISON).all()


def test_a_failed_read_copies_nothing() -> None:
    pair = Pair(FaultPlan(at={1: Fault.FAIL}))
    ops = [pair.sink.read(pair.source, [page], [page]) for page in (1, 2, 3)]
    assert [finish(op) for op in ops] == [ReadState.DONE, ReadState.FAILED, ReadState.DONE]
    assert (pair.ours.pages[2] == POISON).all()


def test_peer_death_takes_every_read_of_the_peer() -> None:
    pair = Pair(FaultPlan(at={2: Fault.PEER_DEATH}))
    other = pair.exporter()
    mine = pair.sink.read(pair.source, [1], [1])
    others = pair.sink.read(other, [2], [2])
    last = pair.sink.read(pair.source, [3], [3])
    assert [finish(op) for op in (mine, others, last)] == [ReadState.FAILED, ReadState.DONE, ReadState.FAILED]
    assert "died" in mine.error
    for refused in (pair.sink.connect, lambda handle: pair.sink.read(handle, [1], [1])):
        with pytest.raises(TransferError, match="died"):
            refused(pair.source)
    assert finish(pair.sink.read(pair.exporter(), [1], [1])) is ReadState.DONE


def faults_of(seed: int, at: dict[int, Fault]) -> list[Fault | None]:
    rates = {Fault.FAIL: 0.3, Fault.CORRUPT: 0.3}
    pair = Pair(FaultPlan(seed=seed, rates=rates, at=at))
    faults: list[Fault | None] = []
    for _ in range(300):
        pair.ours.pages[:] = POISON
        state = finish(pair.sink.read(pair.source, [1], [1]))
        if state is ReadState.FAILED:
            faults.append(Fault.FAIL)
        else:
            faults.append(None if pair.arrived(1) else Fault.CORRUPT)
    return faults


def test_plans_repeat_exactly() -> None:
    faults = faults_of(5, {})
    assert faults == faults_of(5, {}) and faults != faults_of(6, {})
    assert all(60 < faults.count(x) < 120 for x in (Fault.FAIL, Fault.CORRUPT))


def test_a_named_fault_does_not_change_the_others() -> None:
    named = faults_of(5, {7: Fault.DUPLICATE})
    assert named[7] is None
    assert named[:7] + named[8:] == faults_of(5, {})[:7] + faults_of(5, {})[8:]
