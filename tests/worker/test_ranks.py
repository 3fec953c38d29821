"""The frontend's end of its ranks, with a rank that is only a sender."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import zmq
from millrace_serve.engine.core import Events, Load
from millrace_serve.engine.sim.factory import sim_layout
from millrace_serve.worker.channels import Sender
from millrace_serve.worker.config import Timeouts, WorkerConfig
from millrace_serve.worker.frontend.ranks import Ranks, StepWatch
from millrace_serve.worker.launcher import Launcher, OnExit
from millrace_serve.worker.messages import FromRank, RankReady, Report


class Nobody(Launcher):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.endpoint: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def bind(self) -> str:
        return f"ipc://{self._folder}/frontend"

    async def start(self, config: WorkerConfig, frontend: str, on_exit: OnExit) -> None:
        self.endpoint.set_result(frontend)

    async def stop(self, grace_s: float) -> None: ...


def ready(config: WorkerConfig, endpoint: str) -> RankReady:
    return RankReady(
        engine_endpoint=endpoint, reader_endpoint="", vocab_size=2, max_context=1, eos_token_ids=[],
        layout=sim_layout(config.limits, config.sim), num_pages=2, startup={}, memory=None,
    )  # fmt: skip


async def test_a_report_that_cannot_be_handled_ends_the_worker(tmp_path: Path) -> None:
    """What it said is lost, and somebody may wait for it: better all of them know."""
    launcher, lost = Nobody(tmp_path), asyncio.get_running_loop().create_future()

    def on_report(rank: int, report: Report) -> None:
        raise AssertionError("illegal transition")

    ranks = Ranks(WorkerConfig(engine="sim"), launcher, on_report, lost.set_result)
    starting = asyncio.create_task(ranks.start())
    context: zmq.Context[Any] = zmq.Context()
    rank: Sender[FromRank] = Sender(context, await launcher.endpoint)
    rank.send(FromRank(0, Events()))
    rank.send(FromRank(0, Events()))
    assert "rank 0: AssertionError: illegal transition" in await asyncio.wait_for(lost, 20)
    await asyncio.wait({starting})
    assert "illegal transition" in str(starting.exception())
    await ranks.stop(0)
    context.destroy(linger=0)


async def test_a_rank_that_hangs_ends_the_worker(tmp_path: Path) -> None:
    """It said that a sequence runs, and then no more."""
    launcher, lost = Nobody(tmp_path), asyncio.get_running_loop().create_future()
    config = WorkerConfig(engine="sim", timeouts=Timeouts(step=0.2))
    ranks = Ranks(config, launcher, lambda rank, report: None, lost.set_result)
    starting = asyncio.create_task(ranks.start())
    context: zmq.Context[Any] = zmq.Context()
    rank: Sender[FromRank] = Sender(context, await launcher.endpoint)
    rank.send(FromRank(0, ready(config, f"ipc://{tmp_path}/rank")))
    await asyncio.wait_for(starting, 20)
    rank.send(FromRank(0, Events(load=Load(running=1))))
    assert "rank 0 hangs" in await asyncio.wait_for(lost, 20)
    await ranks.stop(0)
    context.destroy(linger=0)


def test_only_a_rank_that_computes_may_not_be_silent() -> None:
    watch = StepWatch(limit_s=10)
    watch.heard(0, running=1, now=0)
    watch.heard(1, running=2, now=5)
    assert watch.hung(now=10) is None
    assert watch.hung(now=10.5) == 0
    watch.heard(0, running=1, now=11)
    assert watch.hung(now=15.5) == 1
    watch.heard(1, running=0, now=16)
    assert watch.hung(now=20) is None
