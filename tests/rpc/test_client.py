"""Reading a stream that must not fall silent."""

from __future__ import annotations

import asyncio
import time

import pytest
from millrace_rpc.client import heard_within


async def says(after_s: float) -> str:
    await asyncio.sleep(after_s)
    return "it"


async def test_what_is_heard_in_time() -> None:
    assert await heard_within(5, says(0.01)) == "it"


async def test_silence_ends_the_reading() -> None:
    ended = asyncio.Event()

    async def silent() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        await heard_within(0.02, silent())
    await asyncio.wait_for(ended.wait(), 5)


async def test_a_pause_of_our_own_is_not_the_peers_silence() -> None:
    reading = asyncio.create_task(heard_within(0.2, says(0.05)))
    await asyncio.sleep(0)
    time.sleep(0.25)
    assert await reading == "it"


async def test_errors_and_cancellations_pass() -> None:
    async def fails() -> None:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        await heard_within(5, fails())
    reading = asyncio.create_task(heard_within(5, says(5)))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
