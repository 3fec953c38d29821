"""Waiting: until something changes, or only so long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError


class Wakeup:
    """Lets coroutines sleep until something changes. A wake-up carries no data."""

    def __init__(self) -> None:
        self._sleepers: set[asyncio.Future[bool]] = set()

    def fire(self) -> None:
        sleepers, self._sleepers = self._sleepers, set()
        for sleeper in sleepers:
            _wake(sleeper, True)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the next `fire`. False: the time ran out first."""
        loop = asyncio.get_running_loop()
        sleeper = loop.create_future()
        self._sleepers.add(sleeper)
        timer = None if timeout_s is None else loop.call_later(max(timeout_s, 0.0), _wake, sleeper, False)
        try:
            return await sleeper
        finally:
            self._sleepers.discard(sleeper)
            if timer is not None:
                timer.cancel()


def _wake(sleeper: asyncio.Future[bool], fired: bool) -> None:
    if not sleeper.done():
        sleeper.set_result(fired)


@contextlib.asynccontextmanager
async def within(seconds: float, what: str) -> AsyncIterator[None]:
    """A body that must end in time. Raises MillraceError (STALLED) when it does not."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise MillraceError(Reason.STALLED, f"{what} took longer than {seconds:g} s") from None
