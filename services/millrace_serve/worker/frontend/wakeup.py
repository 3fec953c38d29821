"""Waiting: until something changes, or only so long."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine

from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError


class Wakeup:
    """Lets coroutines sleep until something changes. A wake-up carries no data."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def fire(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the next `fire`. False: the time ran out first."""
        if timeout_s is None:  # once per step for a Link: a timeout would make it 40% dearer
            return await self._next.wait()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._next.wait()
        except TimeoutError:
            return False


async def together(*calls: Coroutine[None, None, None]) -> None:
    """Run all. The first that fails ends the others: who tries again would add to what they ask for."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def within(seconds: float, what: str) -> AsyncIterator[None]:
    """A body that must end in time. Raises MillraceError (STALLED) when it does not."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise MillraceError(Reason.STALLED, f"{what} took longer than {seconds:g} s") from None
