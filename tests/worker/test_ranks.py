"""The frontend's end of its ranks, with a rank that is only a sender."""

import asyncio
import queue
import re
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import zmq
from common.test_starvation import PID, Kernel
from millrace_common.pace import LEAST_S, Starvation
from millrace_rpc.errors import MillraceError
from millrace_serve.engine.core import Events, Load
from millrace_serve.engine.health import heartbeat as heartbeat_module
from millrace_serve.engine.health.heartbeat import HeartbeatThread
from millrace_serve.engine.health.progress import Progress
from millrace_serve.engine.health.rank_watch import RankHeartbeat, RankWatch
from millrace_serve.engine.sim.factory import sim_layout
from millrace_serve.transfer.base import MemoryHandle
from millrace_serve.worker import main as worker_main
from millrace_serve.worker.channels import Receiver, Sender
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.frontend import ranks as ranks_module
from millrace_serve.worker.frontend.ranks import Handler, Ranks
from millrace_serve.worker.launch import LocalLauncher
from millrace_serve.worker.launcher import Launcher, OnExit
from millrace_serve.worker.messages import (
    Dropped,
    FreezeGc,
    FromRank,
    GcFrozen,
    RankFailed,
    RankReady,
    Report,
    SetWeights,
    StartProfile,
    ToEngine,
    WeightsSet,
)
from millrace_testing import HANG_S


class Nobody(Launcher):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.graces: list[float] = []  # of its stops
        self.endpoint: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def bind(self) -> str:
        return f"ipc://{self._folder}/frontend"

    async def start(self, config: WorkerConfig, frontend: str, group: str, on_exit: OnExit) -> None:
        self.endpoint.set_result(frontend)

    async def stop(self, grace_s: float) -> None:
        self.graces.append(grace_s)


def ready(config: WorkerConfig, endpoint: str) -> RankReady:
    return RankReady(
        engine_endpoint=endpoint, reader_endpoint="", vocab_size=2, max_context=1, eos_token_ids=[],
        layout=sim_layout(config.limits, config.sim), num_pages=2, startup={},
        memory=MemoryHandle("nixl", "agent", b"", 0, 64, 2),
    )  # fmt: skip


@dataclass
class Bench:
    """`lost` and `strays` get what the ranks tell."""

    config: WorkerConfig
    launcher: Nobody
    ranks: Ranks
    lost: list[str]
    strays: list[str]
    context: zmq.Context[Any]  # of the rank

    async def begin(self) -> tuple[asyncio.Task[None], Sender[FromRank]]:
        """A start under way, and what its ranks send with."""
        self.launcher.endpoint = asyncio.get_running_loop().create_future()
        starting = asyncio.create_task(self.ranks.start())
        return starting, Sender(self.context, await self.launcher.endpoint)

    async def start(self, name: str = "rank") -> tuple[Receiver[ToEngine], Sender[FromRank]]:
        """The inbox and the outbox of ranks that are ready, the last one first."""
        starting, outbox = await self.begin()
        inbox = self.inbox(name)
        for rank in reversed(range(self.config.num_ranks)):
            outbox.send(FromRank(rank, ready(self.config, inbox.endpoint)))
        await asyncio.wait_for(starting, HANG_S)
        return inbox, outbox

    def inbox(self, name: str) -> Receiver[ToEngine]:
        return Receiver(self.context, f"{self.launcher.bind()}-{name}", ToEngine)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Callable[..., Bench]]:
    """All end with the test: a context that a failed test leaves would wait for its sockets when it is collected."""
    made: list[Ranks] = []
    context: zmq.Context[Any] = zmq.Context()

    def make(on_events: Handler = lambda rank, events: None, **values: Any) -> Bench:
        config, launcher = WorkerConfig(engine="sim", **values), Nobody(tmp_path)
        lost, strays = list[str](), list[str]()
        made.append(Ranks(config, launcher, {Events: on_events}, lost.append, strays.append))
        return Bench(config, launcher, made[-1], lost, strays, context)

    yield make
    for one in made:
        await one.stop(0)
    context.destroy(linger=0)


async def test_report_that_cannot_be_handled_ends_the_worker(bench: Callable[..., Bench]) -> None:
    """What it said is lost, and somebody may wait for it: better all of them know."""
    it = bench(Mock(side_effect=AssertionError("illegal transition")))
    starting, rank = await it.begin()
    rank.send(FromRank(0, Events()))
    rank.send(FromRank(0, Events()))
    await asyncio.wait({starting}, timeout=HANG_S)
    assert "illegal transition" in str(starting.exception())
    assert it.lost == ["a report of rank 0: AssertionError: illegal transition"]


async def test_rank_that_hangs_ends_the_worker(bench: Callable[..., Bench]) -> None:
    """Its process goes on, and its main thread does not. What else the rank says is no progress, and what it announces
    is no hang.
    """
    it = bench()
    ranks = it.ranks
    assert not ranks.watch.busy
    _, rank = await it.start()
    for doing in ("a profile", ""):
        rank.send(FromRank(0, RankHeartbeat(marks=5, waiting=False, launched=3, limit_s=0.3, doing=doing)))
        while ranks.watch.busy != bool(doing):
            await asyncio.sleep(0.01)
    asking = asyncio.create_task(ranks.freeze_gc())
    while not it.lost:
        rank.send(FromRank(0, RankHeartbeat(marks=5, waiting=False, launched=3, limit_s=0.3, doing="")))
        rank.send(FromRank(0, Events(load=Load(running=1))))
        await asyncio.sleep(0.01)
    assert "rank 0 hangs: no " in it.lost[0]
    with pytest.raises(MillraceError, match="rank 0 hangs"):
        await asking


async def test_fault_of_the_watch_ends_the_worker() -> None:
    """Else nobody would notice a rank that hangs."""
    watch = Mock(hung=Mock(side_effect=KeyError))
    assert "cannot be watched" in await RankWatch.until_hung(watch)


@pytest.mark.parametrize("told", [True, False])
async def test_rank_that_ends_before_its_last_words_come_is_lost_by_them(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    monkeypatch.setattr(ranks_module, "LAST_WORDS_S", 3600.0 if told else 0.0)
    it = bench()
    starting, rank = await it.begin()
    it.ranks._on_exit(0, "exit code 1")
    assert not it.lost
    if told:
        rank.send(FromRank(0, RankFailed("no memory")))
    why = "rank 0 failed: no memory" if told else "rank 0 ended (exit code 1)"
    with pytest.raises(MillraceError, match=re.escape(why)):
        await asyncio.wait_for(starting, HANG_S)
    assert it.lost == [why]
    it.ranks._on_exit(0, "signal 9")
    await it.ranks.stop(5.0)


async def test_rank_that_ends_is_lost_once_by_its_last_words(bench: Callable[..., Bench]) -> None:
    """Those beside it have no work to end, and are stopped at once."""
    it = bench()
    ranks, (_, rank) = it.ranks, await it.start()
    rank.send(FromRank(0, RankFailed("no memory", refused=True)))
    assert ranks._inbox._socket.poll(20_000)  # it has come, and the loop has not had a turn
    ranks._on_exit(0, "exit code 1")
    ranks._on_exit(0, "exit code 1")
    assert it.lost == ["rank 0 failed: no memory"] and ranks.exit_code == 2
    await ranks.stop(5.0)
    assert it.launcher.graces == [0.0]


async def test_ranks_that_end_before_an_answer_leave_no_question_to_the_next(bench: Callable[..., Bench]) -> None:
    it = bench()
    ranks = it.ranks
    with pytest.raises(MillraceError, match="the ranks are not up"):
        await ranks.freeze_gc()
    first, _ = await it.start("first")
    asking = asyncio.create_task(ranks.freeze_gc())
    await asyncio.sleep(0)
    assert first.receive(20) == [FreezeGc()]
    await ranks.stop(0)
    assert asking in (await asyncio.wait({asking}, timeout=HANG_S))[0]
    with pytest.raises(MillraceError, match="ended before they answered"):
        asking.result()
    with pytest.raises(MillraceError, match="the ranks are not up"):  # or a profile would run that nobody makes
        await ranks.profile(StartProfile("", ""))

    second, rank = await it.start("second")
    asking = asyncio.create_task(ranks.freeze_gc())
    await asyncio.sleep(0)
    assert second.receive(20) == [FreezeGc()]
    rank.send(FromRank(0, GcFrozen(7)))
    assert await asyncio.wait_for(asking, HANG_S) == [7]


async def test_answers_are_in_the_order_of_ranks(bench: Callable[..., Bench]) -> None:
    """Not in that in which the ranks became ready: the one that failed is named by its place."""
    it = bench(dp=2)
    _, frontend = await it.start()
    asking = asyncio.create_task(it.ranks.set_weights(SetWeights("/x", "v")))
    await asyncio.sleep(0)
    for rank, error in ((0, ""), (1, "no such file")):
        frontend.send(FromRank(rank, WeightsSet(sim_layout(it.config.limits, it.config.sim), error)))
    assert await asyncio.wait_for(asking, HANG_S) == "rank 1: no such file"


async def test_what_nobody_asked_for_is_dropped_and_counted(bench: Callable[..., Bench]) -> None:
    """Of no rank, an answer without a question, a rank that is ready twice, bytes that are no message."""
    reports: asyncio.Queue[Report] = asyncio.Queue()
    it = bench(lambda rank, report: reports.put_nowait(report))
    first, rank = await it.start("first")
    second = it.inbox("second")
    for stray in (
        FromRank(1, RankFailed("of no rank")),
        FromRank(-1, RankFailed("of no rank")),
        FromRank(0, ready(it.config, second.endpoint)),
        FromRank(0, GcFrozen(3)),
        FromRank(0, Dropped()),
        {"no": "message"},
    ):
        rank.send(stray)  # type: ignore[arg-type]
    rank.send(FromRank(0, Events()))
    assert await asyncio.wait_for(reports.get(), HANG_S) == Events()
    assert it.strays == ["RankFailed", "RankFailed", "RankReady", "GcFrozen", "undecodable", "undecodable"]
    assert not it.lost
    asking = asyncio.create_task(it.ranks.freeze_gc())
    await asyncio.sleep(0)
    assert first.receive(20) == [FreezeGc()] and second.receive() == []
    rank.send(FromRank(0, GcFrozen(7)))
    assert await asyncio.wait_for(asking, HANG_S) == [7]


async def test_rank_that_is_lost_between_two_warm_up_requests_ends_the_start() -> None:
    """The requests that ran have failed; one that begins afterwards would wait for its whole time-out."""
    loop = asyncio.get_running_loop()
    ranks = SimpleNamespace(exit_code=1)
    lost, leaving = loop.create_future(), loop.create_future()
    frontend: Any = SimpleNamespace(start=asyncio.Event().wait, ranks=ranks, lost=lost, leaving=leaving)
    living = asyncio.create_task(worker_main._live(frontend, asyncio.Event(), ""))
    await asyncio.sleep(0)
    frontend.lost.set_result("rank 1 ended (signal 9)")
    assert await asyncio.wait_for(living, HANG_S) == (1, "could not start: rank 1 ended (signal 9)")


async def test_ranks_may_be_stopped_by_two_at_once() -> None:
    """By a sleep, and by the end of the process."""
    launcher, end, stops = LocalLauncher(), asyncio.get_running_loop().create_future(), list[asyncio.Task[None]]()

    class Rank:
        def kill(self) -> None:
            if not stops:  # by the first call, which has one more wait to do
                stops.append(asyncio.create_task(launcher.stop(20)))

    rank: Any = Rank()
    launcher._processes, launcher._ends = [rank], [end]
    end.set_result(None)
    await launcher.stop(20)
    await asyncio.wait_for(stops[0], HANG_S)


def test_announcement_is_with_the_frontend_before_the_work_begins() -> None:
    """Also one from another thread. Then the work may keep the interpreter's lock for as long as it likes."""
    progress, sent = Progress(), list[RankHeartbeat]()
    with HeartbeatThread(progress, sent.append):
        for _ in range(20):
            with progress.busy("a compilation"):
                assert sent[-1].doing == "a compilation"
            assert sent[-1].doing == ""
        move = progress.busy("a move")
        thread = threading.Thread(target=move.__enter__)
        thread.start()
        thread.join()
        assert sent[-1].doing == "a move"
    count = len(sent)
    with progress.busy("after its end"):
        assert len(sent) == count


def test_heartbeats_come_by_themselves_and_say_how_far_the_rank_is() -> None:
    progress, heartbeats = Progress(), queue.Queue[RankHeartbeat]()
    with HeartbeatThread(progress, heartbeats.put):
        assert heartbeats.get(timeout=HANG_S).waiting
        with progress.waits():
            pass
        while (heartbeat := heartbeats.get(timeout=HANG_S)).marks < 2:
            pass
        assert (heartbeat.marks, heartbeat.waiting, heartbeat.limit_s) == (2, False, LEAST_S)


def test_heartbeat_tells_what_any_thread_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread waits for the one that launches kernels."""
    kernel, heartbeats = Kernel(tmp_path), queue.Queue[RankHeartbeat]()

    def clock() -> float:
        kernel.now += 0.4
        kernel.thread(7)
        kernel.thread(8, 0.1, 0.3)
        return kernel.now

    kernel.thread(8)
    monkeypatch.setattr(heartbeat_module, "Starvation", lambda pid: Starvation(PID, tmp_path, clock))
    with HeartbeatThread(Progress(), heartbeats.put):
        while heartbeats.get(timeout=HANG_S).starved != pytest.approx(0.75):  # in most looks a bit below it
            pass


def test_rank_that_comes_no_further_writes_its_stacks_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits, or is announced, is no reason."""
    monkeypatch.setattr(heartbeat_module, "HEARTBEAT_S", 0.005)
    monkeypatch.setattr(heartbeat_module, "TICK_S", 0.005)
    progress, written, heartbeats = Progress(), queue.Queue[str](), queue.Queue[RankHeartbeat]()
    progress.limit_s = 0.0

    def few_heartbeats() -> None:
        for _ in range(heartbeats.qsize() + 3):
            heartbeats.get(timeout=HANG_S)

    with HeartbeatThread(progress, heartbeats.put, lambda: written.put(caplog.messages[-1])):
        few_heartbeats()
        with progress.waits(), progress.busy("a compilation"):
            few_heartbeats()
        assert written.empty()
        for _ in range(2):
            assert "no step has ended" in written.get(timeout=HANG_S)
            few_heartbeats()
            assert written.empty()
            with progress.waits():
                pass
