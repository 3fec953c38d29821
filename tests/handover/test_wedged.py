"""Whose transport is broken: the decisions, and what both ends do about them."""

from __future__ import annotations

import asyncio
import itertools
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.v1 import kv_pb2
from millrace_serve.handover import doubts
from millrace_serve.handover.doubts import CHECK, Doubts
from millrace_serve.handover.sources import Sources
from millrace_serve.handover.wedged import LIMIT, PAUSE_S, READERS, WINDOW_S, Isolation, Verdict, Wedge
from millrace_serve.transfer.base import MemoryHandle
from millrace_serve.transfer.messages import AddSource, CloseSource, DropSource, ReadPages, RenewSource, SourceRenewed


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


# ------------------------------------------------------------------------------------------------ the decisions


def test_one_reader_proves_nothing_however_often_it_fails() -> None:
    wedge = Wedge(Clock())
    assert not any(wedge.reported("a", checked=False) for _ in range(100))


def test_two_readers_do_within_the_window() -> None:
    clock = Clock()
    wedge = Wedge(clock)
    assert not wedge.reported("a", checked=False)
    clock.now += WINDOW_S
    assert not wedge.reported("b", checked=False)  # the first report is old
    clock.now += WINDOW_S / 2
    assert wedge.reported("a", checked=False)


def test_a_reader_that_has_checked_itself_is_enough() -> None:
    assert Wedge(Clock()).reported("a", checked=True)


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.sampled_from("abc"), st.booleans()), max_size=200))
def test_renewals_are_rare_and_nothing_is_kept_beyond_the_window(events: list[tuple[float, str, bool]]) -> None:
    clock = Clock()
    wedge = Wedge(clock)
    renewed: list[float] = []
    for passed, reader, checked in events:
        clock.now += passed
        if wedge.reported(reader, checked):
            renewed.append(clock.now)
        assert all(clock.now - at < WINDOW_S for at in wedge._reports.values())
    assert all(b - a >= PAUSE_S for a, b in itertools.pairwise(renewed))


def test_a_single_bad_source_of_two_casts_no_doubt_on_the_reader() -> None:
    isolation = Isolation()
    for _ in range(10 * LIMIT):
        assert isolation.failed("bad", {"bad", "good"}) is Verdict.NOTHING


def test_failures_from_all_sources_do() -> None:
    isolation = Isolation()
    verdicts = [isolation.failed("ab"[i % 2], {"a", "b"}) for i in range(LIMIT)]
    assert verdicts == [Verdict.NOTHING] * (LIMIT - 1) + [Verdict.LEAVE]


def test_a_good_read_begins_anew() -> None:
    isolation = Isolation()
    for i in range(5 * LIMIT):
        if i % (LIMIT - 1) == 0:
            isolation.succeeded()
        assert isolation.failed("ab"[i % 2], {"a", "b"}) is Verdict.NOTHING


def test_a_single_source_asks_for_a_check_and_none_for_nothing() -> None:
    isolation = Isolation()
    verdicts = [isolation.failed("a", {"a"}) for _ in range(LIMIT)]
    assert verdicts[-2:] == [Verdict.NOTHING, Verdict.CHECK]
    assert isolation.verdict(set()) is Verdict.NOTHING  # it died


@given(st.lists(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd")))
def test_only_living_sources_count_and_are_remembered(failed: list[str], living: set[str]) -> None:
    isolation = Isolation()
    for source in failed:
        isolation.failed(source, set("abcd"))
    verdict = isolation.verdict(living)
    counts = {source: failed.count(source) for source in living if source in failed}
    assert dict(isolation._failed) == counts
    blamed = sum(counts.values()) >= LIMIT and len(counts) == len(living)
    assert verdict is (Verdict.NOTHING if not blamed else Verdict.LEAVE if len(living) > 1 else Verdict.CHECK)


# ------------------------------------------------------------------------------------------------ the exporter


def handle(agent: str) -> MemoryHandle:
    return MemoryHandle("nixl", agent, b"", 0, 64, 10)


class Ranks:
    """Two ranks of one replica."""

    def __init__(self) -> None:
        self.memory = [handle("kv-0"), handle("kv-1")]
        self.sent: list[tuple[int, Any]] = []

    def memory_of(self, replica: int) -> list[MemoryHandle]:
        return list(self.memory)

    def memory_of_rank(self, rank: int) -> MemoryHandle:
        return self.memory[rank]

    def rank_of(self, agent: str) -> int | None:
        return next((rank for rank, memory in enumerate(self.memory) if memory.agent == agent), None)

    def renew_memory(self, rank: int, memory: MemoryHandle) -> str:
        before, self.memory[rank] = self.memory[rank], memory
        return before.agent

    def send_reader(self, rank: int, message: Any) -> None:
        self.sent.append((rank, message))


def report(agent: str, reader: str) -> kv_pb2.ReadFailed:
    return kv_pb2.ReadFailed(agent=agent, reader=reader)


async def test_an_agent_that_several_readers_report_is_replaced_and_goes_with_its_last_stream() -> None:
    ranks: Any = Ranks()
    sources = Sources(2, ranks)
    with sources.lent(0) as first, sources.lent(0):
        assert [memory.agent for memory in first] == ["kv-0", "kv-1"]
        for reader in range(READERS):
            assert ranks.sent == []
            sources.on_failed(report("kv-1", f"reader {reader}"))
        assert ranks.sent == [(1, RenewSource())]
        sources.on_renewed(1, SourceRenewed(handle("kv-1.1")))
        with sources.lent(0) as third:
            assert [memory.agent for memory in third] == ["kv-0", "kv-1.1"]
        assert len(ranks.sent) == 1  # two streams still read through the old one
    assert ranks.sent[1:] == [(1, CloseSource("kv-1"))]
    assert not sources._users and not sources._old


async def test_reports_about_a_replaced_agent_or_another_worker_change_nothing() -> None:
    ranks: Any = Ranks()
    sources = Sources(2, ranks)
    sources.on_renewed(0, SourceRenewed(handle("kv-0.1")))
    assert ranks.sent == [(0, CloseSource("kv-0"))]
    for agent in ("kv-0", "kv-9"):
        for reader in "abc":
            sources.on_failed(report(agent, reader))
    assert len(ranks.sent) == 1


# ------------------------------------------------------------------------------------------------ the reader


class Reader:
    def __init__(self, *epochs: str) -> None:
        self.ranks: Any = Ranks()
        self.peers: Any = types.SimpleNamespace(epochs=frozenset(epochs))
        self.left: asyncio.Queue[str] = asyncio.Queue()
        self.doubts = Doubts("ours", 2, self.ranks, self.peers, self.left.put_nowait)

    def fail(self, *epochs: str) -> None:
        for i in range(2 * LIMIT):
            self.doubts.read_failed(epochs[i % len(epochs)])

    async def checks(self) -> None:
        async with asyncio.timeout(20):
            while len(self.ranks.sent) < 4:
                await asyncio.sleep(0.01)
        for rank in range(2):
            agent = f"kv-{rank}"
            read = ReadPages(CHECK, 0, [0], [0], agent)
            assert self.ranks.sent[2 * rank : 2 * rank + 2] == [(rank, AddSource(handle(agent))), (rank, read)]


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts, "CONFIRM_S", 0.05)


@pytest.mark.usefixtures("_quick")
async def test_a_worker_that_can_read_from_nobody_leaves() -> None:
    reader = Reader("a", "b")
    reader.fail("a", "b")
    assert "all of 2 workers" in await asyncio.wait_for(reader.left.get(), 20)


@pytest.mark.usefixtures("_quick")
async def test_it_stays_when_the_sources_have_died_meanwhile() -> None:
    reader = Reader("a", "b")
    reader.fail("a", "b")
    reader.peers.epochs = frozenset()
    timer = reader.doubts._timer
    assert timer is not None
    async with asyncio.timeout(20):
        while reader.doubts._timer is not None:
            await asyncio.sleep(0.01)
    assert reader.left.empty() and reader.ranks.sent == []


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("error", ["", "no device"])
async def test_with_one_source_it_reads_its_own_pages_first(error: str) -> None:
    reader = Reader("a")
    reader.fail("a")
    assert not reader.doubts.report("kv-9").checked
    await reader.checks()
    reader.doubts.on_check(0, "")
    reader.doubts.on_check(1, error)
    reader.doubts.on_check(1, error)  # stuck first, then done
    assert reader.ranks.sent[4:] == [(0, DropSource("kv-0")), (1, DropSource("kv-1"))]
    assert reader.doubts.report("kv-9") == kv_pb2.ReadFailed(agent="kv-9", reader="ours", checked=not error)
    assert reader.left.empty() if not error else error in reader.left.get_nowait()
    reader.doubts.read_well()
    assert not reader.doubts.report("kv-9").checked


@pytest.mark.usefixtures("_quick")
async def test_ranks_that_end_while_they_check_are_forgotten() -> None:
    """The worker slept: their answers never come, and those of the next ranks count from the beginning."""
    reader = Reader("a")
    reader.fail("a")
    await reader.checks()
    reader.doubts.forget()
    reader.ranks.sent.clear()
    reader.doubts.on_check(0, "late")
    assert reader.left.empty() and reader.ranks.sent == []
    for _ in range(LIMIT - 1):
        reader.doubts.read_failed("a")
    assert reader.doubts._timer is None
    reader.fail("a")
    await reader.checks()
