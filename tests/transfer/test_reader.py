import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from millrace_serve.engine.core import RequestId
from millrace_serve.transfer import reader as reader_module
from millrace_serve.transfer.base import KvSink, MemoryHandle
from millrace_serve.transfer.messages import (
    AddSource,
    DropSource,
    FromReader,
    ReadDone,
    ReadPages,
    ReadStuck,
    StopReader,
    ToReader,
)
from millrace_serve.transfer.nixl import NixlSink
from millrace_serve.transfer.reader import Reader
from millrace_testing import HANG_S
from millrace_testing.faulty_transfer import Fault, FaultPlan, FaultySink
from millrace_testing.local_transfer import LocalFabric, LocalSink, LocalSource
from transfer.pools import LOOPBACK, LOOPBACK_TCP, NixlExporter, Pool

ID = RequestId(7, 0)
NEVER_S, SOON_S = 1000.0, 0.02


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "CLOSE_TIMEOUT_S", 0.02)


class Inbox:
    """A queue as a rank's ZeroMQ inbox; `empty` is set while the reader waits without limit."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[ToReader] = queue.SimpleQueue()
        self.empty = threading.Event()

    def receive(self, wait_s: float | None) -> list[ToReader]:
        taken: list[ToReader] = []
        try:
            if wait_s is None:
                self.empty.set()
                taken.append(self.commands.get())
                self.empty.clear()
            elif wait_s:
                taken.append(self.commands.get(timeout=wait_s))
            while True:
                taken.append(self.commands.get_nowait())
        except queue.Empty:
            return taken


class Running:
    """A reader in a thread of its own, and its reports in order."""

    def __init__(
        self,
        sink: KvSink,
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inbox = Inbox()
        self.reports: queue.SimpleQueue[FromReader] = queue.SimpleQueue()
        self.reader = Reader(sink, self.inbox, self.reports.put, stall_s, clock)
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.reader.run()
        except Exception as error:
            self.error = error

    def do(self, command: ToReader) -> None:
        self.inbox.commands.put(command)

    def connect(self, source: MemoryHandle) -> None:
        self.do(AddSource(source))

    def read(self, read: int, source: MemoryHandle, src_pages: list[int], dst_pages: list[int]) -> None:
        self.do(ReadPages(ID, read, src_pages, dst_pages, source.agent))

    def next(self) -> FromReader:
        return self.reports.get(timeout=HANG_S)

    def finished(self, count: int) -> dict[int, str]:
        """Numbers and errors of the next `count` reports, which must all be ReadDone."""
        result = {}
        for _ in range(count):
            report = self.next()
            assert isinstance(report, ReadDone) and report.id == ID
            result[report.read] = report.error
        return result

    def quarantined(self) -> list[int]:
        return [page for x in self.reader._in_flight if x.stuck for page in x.read.dst_pages]

    def close(self) -> None:
        if self._thread.is_alive():
            self.do(StopReader())
            self._thread.join(HANG_S)
        assert not self._thread.is_alive() and not (self.reader._in_flight and self.error is None)


class Rig(Running):
    """A reader over a fault plan."""

    def __init__(
        self,
        plan: FaultPlan,
        stall_s: float = NEVER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.theirs, self.ours = Pool(16, 256, seed=1), Pool(16, 256)
        self.fabric = LocalFabric()
        self.exporter = LocalSource(self.fabric, self.theirs.buffer)
        self.source = self.exporter.handle()
        sink = FaultySink(LocalSink(self.fabric, self.ours.buffer), self.ours.buffer, plan)
        super().__init__(sink, stall_s, clock)
        self.connect(self.source)


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.close()


def rig_of(rigs: list[Rig], plan: FaultPlan | None = None, stall_s: float = NEVER_S) -> Rig:
    rigs.append(Rig(plan or FaultPlan(), stall_s))
    return rigs[-1]


def test_reads_finish(rigs: list[Rig]) -> None:
    rig = rig_of(rigs)
    for i in range(16):
        rig.read(i, rig.source, [i], [15 - i])
    assert rig.finished(16) == dict.fromkeys(range(16), "")
    assert np.array_equal(rig.ours.pages, rig.theirs.pages[::-1])
    assert rig.reader._in_flight == []


def test_every_read_finishes_under_faults(rigs: list[Rig]) -> None:
    rates = {Fault.DELAY: 0.2, Fault.REORDER: 0.2, Fault.DUPLICATE: 0.2, Fault.STALL: 0.1, Fault.FAIL: 0.2}
    rig = rig_of(rigs, FaultPlan(seed=3, rates=rates, stall_polls=5))
    for i in range(200):
        rig.read(i, rig.source, [i % 16], [i % 16])
    errors = rig.finished(200)
    assert errors.keys() == set(range(200))
    assert {error for error in errors.values() if error} == {"read failed (injected)"}
    assert list(errors) != sorted(errors), "completions were not reordered"


def test_source_that_cannot_be_connected_fails_its_reads(rigs: list[Rig], caplog: pytest.LogCaptureFixture) -> None:
    rig = rig_of(rigs)
    other = LocalSource(rig.fabric, rig.theirs.buffer)
    source = other.handle()
    other.close()
    rig.connect(source)
    rig.read(0, source, [1], [1])
    assert "not in this process" in rig.finished(1)[0]
    assert "cannot connect to an exporter" in caplog.text


def test_source_that_breaks_the_transport_fails_its_reads(rigs: list[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a claim of 4 billion pages would: of a library's exceptions only some are its own."""
    rig = rig_of(rigs)
    another = msgspec.structs.replace(rig.source, agent="another")
    for i in range(2):
        rig.read(i, rig.source, [1], [1])
        assert rig.finished(1) == {i: ""}, "the reader lives"
        monkeypatch.setattr(LocalSink, "open", Mock(side_effect=MemoryError("std::bad_alloc")))
        rig.connect(another)
        rig.read(9, another, [1], [1])
        assert "another cannot be read: MemoryError: std::bad_alloc" in rig.finished(1)[9]


def test_source_that_was_dropped_or_never_added_is_not_read(rigs: list[Rig]) -> None:
    rig = rig_of(rigs)
    rig.do(DropSource(rig.source.agent))
    rig.read(0, rig.source, [1], [1])
    assert rig.finished(1) == {0: f"{rig.source.agent} was dropped"}


def test_read_that_cannot_start_is_finished_with_its_reason(rigs: list[Rig]) -> None:
    rig = rig_of(rigs)
    rig.read(0, rig.source, [99], [0])
    assert "src_pages holds page 99" in rig.finished(1)[0]


def test_stalled_read_is_quarantined_until_it_is_final(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, FaultPlan(at={0: Fault.DELAY, 1: Fault.DROP}, max_polls=1_000_000_000), SOON_S)
    started = time.monotonic()
    rig.read(0, rig.source, [1, 2], [1, 2])
    assert rig.next() == ReadStuck(ID, 0)
    assert time.monotonic() - started >= SOON_S
    assert rig.quarantined() == [1, 2]
    assert len(rig.reader._in_flight) == 1
    rig.read(1, rig.source, [3], [3])  # the peer was disconnected: this one connects anew
    assert rig.next() == ReadStuck(ID, 1)
    assert "was disconnected" in rig.finished(1)[1]
    assert rig.quarantined() == [1, 2]


def test_reader_that_was_stopped_takes_no_read_for_stuck(rigs: list[Rig]) -> None:
    """What moves the bytes may run in its own process, and had no more time than the reader."""
    calls = 0

    def clock() -> float:
        """0.1 ms for each call, and an hour in which the process was stopped."""
        nonlocal calls
        calls += 1
        return calls * 1e-4 + 3600.0 * (calls > 100)

    rigs.append(rig := Rig(FaultPlan(at={0: Fault.STALL}, stall_polls=1000), 5.0, clock=clock))
    rig.read(0, rig.source, [1], [1])
    assert rig.finished(1) == {0: ""} and calls > 1000


def test_dead_peer_ends_its_reads(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, FaultPlan(at={0: Fault.DELAY, 1: Fault.PEER_DEATH}, max_polls=1_000_000_000))
    for i in range(3):
        rig.read(i, rig.source, [i], [i])
    errors = rig.finished(3)
    assert set(errors) == {0, 1, 2} and all("died" in error for error in errors.values())


def test_dropped_source_ends_a_dropped_read(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, FaultPlan(at={0: Fault.DROP}))
    rig.read(0, rig.source, [1], [1])
    rig.do(DropSource(rig.source.agent))
    assert "was disconnected" in rig.finished(1)[0]


def test_close_reports_what_it_cuts_off_and_refuses_the_rest(rigs: list[Rig]) -> None:
    rig = rig_of(rigs, FaultPlan(at={0: Fault.DROP}))
    rig.read(0, rig.source, [1], [1])
    rig.do(StopReader())
    rig.read(1, rig.source, [2], [2])
    rig.close()
    errors = rig.finished(2)
    assert "closed" in errors[0] and errors[1] == "the reader is closing"
    assert rig.reader._in_flight == []


def test_idle_reader_sleeps_and_still_answers() -> None:
    """No clock call happens while there is nothing to do: the thread waits for its inbox."""
    clock = Mock(return_value=0.0)
    pool, fabric = Pool(16, 256), LocalFabric()
    source = LocalSource(fabric, pool.buffer).handle()
    reader = Running(LocalSink(fabric, pool.buffer), NEVER_S, clock)
    reader.connect(source)
    reader.read(0, source, [1], [1])
    assert reader.finished(1) == {0: ""}
    assert reader.inbox.empty.wait(HANG_S)
    before = clock.call_count
    assert not threading.Event().wait(0.05)
    assert clock.call_count - before <= 2
    reader.close()


def test_reads_that_go_on_are_polled_ever_more_seldom() -> None:
    """Not as fast as a core can: the rank's other threads need it."""
    now, waits = 0.0, list[float | None]()
    pool, fabric = Pool(16, 256), LocalFabric()
    source = LocalSource(fabric, pool.buffer).handle()
    plan = FaultPlan(at={0: Fault.STALL}, stall_polls=1000)

    class Scripted:
        def receive(self, wait_s: float | None) -> list[ToReader]:
            nonlocal now
            waits.append(wait_s)
            now += (wait_s or 0.0) + 1e-4
            if len(waits) == 1:
                return [AddSource(source), ReadPages(ID, 0, [1], [1], source.agent)]
            return [StopReader()] if len(waits) == 200 else []

    sink = FaultySink(LocalSink(fabric, pool.buffer), pool.buffer, plan)
    Reader(sink, Scripted(), lambda report: None, NEVER_S, lambda: now).run()
    pauses = [wait for wait in waits[1:199] if wait is not None]
    assert pauses == sorted(pauses) and pauses[0] == 0.0 and pauses[-1] == reader_module.MAX_SLEEP_S


class BrokenSink(LocalSink):
    def disconnect(self, agent: str) -> None:
        raise ZeroDivisionError("a bug of ours")


def test_an_error_of_ours_ends_the_reader() -> None:
    reader = Running(BrokenSink(LocalFabric(), Pool(1, 64).buffer), NEVER_S)
    reader.do(DropSource("x"))
    reader.close()
    assert isinstance(reader.error, ZeroDivisionError)


def test_between_processes() -> None:
    exporter, pool = NixlExporter(32, 1 << 16, seed=4), Pool(32, 1 << 16)
    rig = Running(NixlSink(pool.buffer, LOOPBACK), NEVER_S)
    with closing(exporter), closing(rig):
        rig.connect(exporter.handle)
        for i in range(32):
            rig.read(i, exporter.handle, [i], [i])
        assert rig.finished(32) == dict.fromkeys(range(32), "")
        assert np.array_equal(pool.pages, exporter.pages)


def test_a_stopped_process_stalls_and_its_death_ends_the_reads() -> None:
    """Over TCP, where the exporting process takes part in a read: its pages are in quarantine until the end."""
    exporter, pool = NixlExporter(16, 1 << 20, seed=5, ucx=LOOPBACK_TCP), Pool(16, 1 << 20)
    rig = Running(NixlSink(pool.buffer, LOOPBACK_TCP), 0.5)
    with closing(exporter), closing(rig):
        rig.connect(exporter.handle)
        rig.read(99, exporter.handle, [0], [0])
        assert rig.finished(1) == {99: ""}
        exporter.stop()
        for i in range(16):
            rig.read(i, exporter.handle, [i], [i])
        assert {rig.next() for _ in range(16)} == {ReadStuck(ID, i) for i in range(16)}
        assert sorted(rig.quarantined()) == list(range(16))
        exporter.kill()
        ended = rig.finished(16)
        assert set(ended) == set(range(16)) and all(exporter.handle.agent in error for error in ended.values())
        assert rig.quarantined() == []
