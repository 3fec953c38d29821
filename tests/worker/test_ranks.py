"""The frontend's end of its ranks, with a rank that is only a sender."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import zmq
from millrace_serve.engine.core import Events
from millrace_serve.worker.channels import Sender
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.launch import Launcher, OnExit
from millrace_serve.worker.messages import FromRank, Report
from millrace_serve.worker.ranks import Ranks


class Nobody(Launcher):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.endpoint: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def bind(self) -> str:
        return f"ipc://{self._folder}/frontend"

    async def start(self, config: WorkerConfig, frontend: str, on_exit: OnExit) -> None:
        self.endpoint.set_result(frontend)

    async def stop(self, grace_s: float) -> None: ...


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
