"""HTTP servers of this process that end at once: tests start and stop thousands."""

import asyncio
from types import SimpleNamespace

import pytest
import uvicorn.server


def hasty_servers(patch: pytest.MonkeyPatch) -> None:
    """uvicorn looks every 0.1 s whether it shall end, and then waits as long again. A tenth of that from here on."""
    hasty = SimpleNamespace(**{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 10)})
    patch.setattr(uvicorn.server, "asyncio", hasty)
