from __future__ import annotations

import queue
import threading
from collections.abc import Hashable, Iterator

import numpy as np
import pytest
from millrace_serve.transfer.base import KvSink, MemoryHandle
from millrace_serve.transfer.faulty import Fault, FaultPlan, FaultySink
from millrace_serve.transfer.local import LocalFabric, LocalSink, LocalSource
from millrace_serve.transfer.nixl import NixlSink
from millrace_serve.transfer.reader import (
    Connected,
    Reader,
    ReaderConfig,
    ReaderDied,
    ReaderEvent,
    ReadFinished,
    ReadStalled,
)
from transfer.pools import DEADLINE_S, LOOPBACK, LOOPBACK_TCP, NixlExporter, Pool

NEVER = ReaderConfig(read_timeout_s=1000.0, close_timeout_s=0.02)
SOON = ReaderConfig(read_timeout_s=0.02, close_timeout_s=0.02)


class Rig:
    """A reader over a fault plan, and its events in order."""

    def __init__(self, plan: FaultPlan, config: ReaderConfig = NEVER) -> None:
        self.theirs, self.ours = Pool(16, 256, seed=1), Pool(16, 256)
        self.fabric = LocalFabric()
        self.exporter = LocalSource(self.fabric, self.theirs.buffer)
        self.source = self.exporter.handle()
        sink = FaultySink(LocalSink(self.fabric, self.ours.buffer), self.ours.buffer, plan)
        self.events: queue.SimpleQueue[ReaderEvent] = queue.SimpleQueue()
        self.reader = Reader(sink, config, self.events.put)

    def next(self) -> ReaderEvent:
        return self.events.get(timeout=DEADLINE_S)

    def finished(self, count: int) -> dict[Hashable, str]:
        """Keys and errors of the next `count` events, which must all be ReadFinished."""
        result = {}
        for _ in range(count):
            event = self.next()
            assert isinstance(event, ReadFinished)
            result[event.key] = event.error
        return result


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.reader.close()


def rig_of(rigs: list[Rig], plan: FaultPlan | None = None, config: ReaderConfig = NEVER) -> Rig:
    rigs.append(Rig(plan or FaultPlan(), config))
    return rigs[-1]


def test_reads_finish_and_connect_by_themselves(rigs: list[Rig]) -> None:
    rig = rig_of(rigs)
    for i in range(16):
        rig.reader.read(("room", i), rig.source, [i], [15 - i])
    assert rig.finished(16) == {("room", i): "" for i in range(16)}
    assert np.array_equal(rig.ours.pages, rig.theirs.pages[::-1])
    assert rig.reader.num_in_flight == 0


def test_every_read_finishes_under_faults(rigs: list[Rig]) -> None:
    rates = {Fault.DELAY: 0.2, Fault.REORDER: 0.2, Fault.DUPLICATE: 0.2, Fault.STALL: 0.1, Fault.FAIL: 0.2}
    rig = rig_of(rigs, FaultPlan(seed=3, rates=rates, stall_polls=5))
    for i in range(200):
        rig.reader.read(i, rig.source, [i % 16], [i % 16])
    errors = rig.finished(200)
    assert errors.keys() == set(range(200))
    assert {error for error in errors.values() if error} == {"read failed (injected)"}
    assert list(errors) != sorted(errors), "completions were not reordered"


def test_connect_is_answered(rigs: list[Rig]) -> None:
    rig = rig_of(rigs)
    rig.reader.connect(rig.source)
    assert rig.next() == Connected(rig.source.agent, "")
    rig.exporter.close()
    rig.reader.connect(rig.source)
    event = rig.next()
    assert isinstance(event, Connected) and "not in this process" in event.error


def test_a_read_that_cannot_start_is_finished_with_its_reason(rigs: list[Rig]) -> None:
    rig = rig_of(rigs)
    rig.reader.read("bad", rig.source, [99], [0])
    assert "src_pages holds page 99" in rig.finished(1)["bad"]


def test_a_stalled_read_is_quarantined_until_it_is_final(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, FaultPlan(at={0: Fault.DELAY, 1: Fault.DROP}, max_polls=1_000_000_000), SOON)
    rig.reader.read("slow", rig.source, [1, 2], [1, 2])
    event = rig.next()
    assert isinstance(event, ReadStalled)
    assert (event.key, event.agent) == ("slow", rig.source.agent) and event.seconds >= SOON.read_timeout_s
    assert rig.reader.num_quarantined_pages == 2
    assert rig.reader.num_in_flight == 1
    rig.reader.read("dropped", rig.source, [3], [3])  # the peer was disconnected: this one connects anew
    assert isinstance(rig.next(), ReadStalled)
    assert "was disconnected" in rig.finished(1)["dropped"]
    assert rig.reader.num_quarantined_pages == 2


def test_a_dead_peer_ends_its_reads(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, FaultPlan(at={0: Fault.DELAY, 1: Fault.PEER_DEATH}, max_polls=1_000_000_000))
    for i in range(3):
        rig.reader.read(i, rig.source, [i], [i])
    errors = rig.finished(3)
    assert set(errors) == {0, 1, 2} and all("died" in error for error in errors.values())


def test_disconnect_ends_a_dropped_read(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, FaultPlan(at={0: Fault.DROP}))
    rig.reader.read("x", rig.source, [1], [1])
    rig.reader.disconnect(rig.source.agent)
    assert "was disconnected" in rig.finished(1)["x"]


def test_close_reports_what_it_cuts_off_and_refuses_the_rest(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, FaultPlan(at={0: Fault.DROP}))
    rig.reader.read("dropped", rig.source, [1], [1])
    rig.reader.close()
    rig.reader.close()
    assert "closed" in rig.finished(1)["dropped"]
    assert rig.reader.num_in_flight == 0


def test_an_idle_reader_sleeps_and_still_answers(rigs: list[Rig]) -> None:
    """No clock call happens while there is nothing to do: the thread is blocked on its queue."""
    calls = 0

    def clock() -> float:
        nonlocal calls
        calls += 1
        return 0.0

    rig = Rig(FaultPlan())
    rig.reader.close()
    done = threading.Event()
    reader = Reader(LocalSink(rig.fabric, rig.ours.buffer), NEVER, lambda event: done.set(), clock)
    reader.connect(rig.source)
    assert done.wait(DEADLINE_S)
    before = calls
    assert not threading.Event().wait(0.05)
    assert calls - before <= 2
    reader.close()


class BrokenSink(LocalSink):
    def disconnect(self, agent: str) -> None:
        raise ZeroDivisionError("a bug of ours")


def test_the_end_of_the_thread_is_reported() -> None:
    events: queue.SimpleQueue[ReaderEvent] = queue.SimpleQueue()
    reader = Reader(BrokenSink(LocalFabric(), Pool(1, 64).buffer), NEVER, events.put)
    reader.disconnect("x")
    assert events.get(timeout=DEADLINE_S) == ReaderDied("ZeroDivisionError: a bug of ours")
    reader.close()


class NixlRig:
    def __init__(self, sink: KvSink, config: ReaderConfig) -> None:
        self.events: queue.SimpleQueue[ReaderEvent] = queue.SimpleQueue()
        self.reader = Reader(sink, config, self.events.put)

    def read_all(self, source: MemoryHandle, num_pages: int) -> None:
        for i in range(num_pages):
            self.reader.read(i, source, [i], [i])

    def next(self) -> ReaderEvent:
        return self.events.get(timeout=DEADLINE_S)


def test_between_processes() -> None:
    exporter, pool = NixlExporter(32, 1 << 16, seed=4), Pool(32, 1 << 16)
    rig = NixlRig(NixlSink(pool.buffer, LOOPBACK), NEVER)
    try:
        rig.reader.connect(exporter.handle)
        assert rig.next() == Connected(exporter.handle.agent, "")
        rig.read_all(exporter.handle, 32)
        events = [rig.next() for _ in range(32)]
        assert all(isinstance(event, ReadFinished) and not event.error for event in events)
        assert np.array_equal(pool.pages, exporter.pages)
    finally:
        rig.reader.close()
        exporter.close()


def test_a_stopped_process_stalls_and_its_death_ends_the_reads() -> None:
    """Over TCP, where the exporting process takes part in a read: its pages are in quarantine until the end."""
    exporter, pool = NixlExporter(16, 1 << 20, seed=5, config=LOOPBACK_TCP), Pool(16, 1 << 20)
    rig = NixlRig(NixlSink(pool.buffer, LOOPBACK_TCP), ReaderConfig(read_timeout_s=0.5))
    try:
        rig.reader.connect(exporter.handle)
        assert rig.next() == Connected(exporter.handle.agent, "")
        rig.reader.read("warm", exporter.handle, [0], [0])
        warm = rig.next()
        assert isinstance(warm, ReadFinished) and not warm.error
        exporter.stop()
        rig.read_all(exporter.handle, 16)
        stalled = [rig.next() for _ in range(16)]
        assert all(isinstance(event, ReadStalled) for event in stalled)
        assert rig.reader.num_quarantined_pages == 16
        exporter.kill()
        ended = [rig.next() for _ in range(16)]
        assert all(isinstance(event, ReadFinished) and exporter.handle.agent in event.error for event in ended)
        assert rig.reader.num_quarantined_pages == 0
    finally:
        rig.reader.close()
        exporter.close()
