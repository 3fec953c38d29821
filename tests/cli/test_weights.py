"""`millrace weights`, as a trainer's script calls it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from millrace.v1 import worker_pb2
from millrace_cli.__main__ import main
from millrace_testing.procs import SIM, Worker, workers

Run = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in a thread, where it has a loop of its own and no signals: exit code, output and error."""
    monkeypatch.setattr(signal, "signal", lambda *_: signal.SIG_DFL)

    def called() -> int:
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0)

    async def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["millrace", "weights", *arguments])
        return await asyncio.to_thread(called), *capsys.readouterr()

    return run


async def states(*both: Worker) -> list[int]:
    return [(await worker.info()).state for worker in both]


async def test_all_workers_are_asked_and_each_is_reported(run: Run, tmp_path: Path) -> None:
    async with workers(tmp_path, "prefill", "decode", sets=(*SIM, "weights_root=/")) as both:
        addresses = [worker.address for worker in both]
        version = (await both[0].info()).weights_version
        code, out, _ = await run(*addresses, "pause")
        assert code == 0 and await states(*both) == [worker_pb2.WORKER_STATE_PAUSED] * 2
        assert all(f"{address}: version {version}, " in out for address in addresses)
        code, out, err = await run(*addresses, "load", "--path", "/x")
        assert code == 1 and out.count("INVALID_ARGUMENT: path /x cannot be loaded") == 2
        assert "2 of 2 workers failed" in err
        code, out, err = await run(addresses[0], "127.0.0.1:1", "resume")
        assert code == 1 and f"{addresses[0]}: version" in out and "1 of 2 workers failed: 127.0.0.1:1" in err
        assert await states(*both) == [worker_pb2.WORKER_STATE_READY, worker_pb2.WORKER_STATE_PAUSED]
