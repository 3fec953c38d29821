"""The command `millrace` in a thread of this process, where it has a loop of its own and no signals."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable

import pytest
from millrace_cli.__main__ import main

Run = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
def millrace(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`await millrace("workers", …)`: exit code, output and error."""
    monkeypatch.setattr(signal, "signal", lambda *_: signal.SIG_DFL)

    def called() -> int:
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    async def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["millrace", *map(str, arguments)])
        return await asyncio.to_thread(called), *capsys.readouterr()

    return run
