"""The bodies of requests from their first byte until they are read: how many bytes are held, and the thread that reads
the large ones beside the event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

T = TypeVar("T")


class Held:
    """The bytes of one body, from `take` to the end of the `with` block."""

    def __init__(self, bodies: Bodies, tenant: str) -> None:
        self._bodies, self._tenant, self._count = bodies, tenant, 0

    def take(self, count: int) -> None:
        self._bodies.count(self._tenant, count)
        self._count += count

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *error: object) -> None:
        self._bodies.forget(self._tenant, self._count)


class Bodies:
    def __init__(self, most: int, most_by_tenant: int) -> None:
        self._most = most
        self._most_by_tenant = most_by_tenant
        self._held = 0
        self._of: Counter[str] = Counter()
        # One: it takes turns with the event loop, and every further one would take as many turns as the loop.
        self._reader = ThreadPoolExecutor(1, "reader")

    def hold(self, tenant: str) -> Held:
        return Held(self, tenant)

    def count(self, tenant: str, more: int) -> None:
        """Raise OVERLOADED when so many more bytes are too many."""
        for have, most, whose in (
            (self._held, self._most, "all clients"),
            (self._of[tenant], self._most_by_tenant, tenant),
        ):
            if have + more > most:
                text = f"bodies of {whose} that are being received have {most} bytes, the limit"
                raise MillraceError(Reason.OVERLOADED, text)
        self._held += more
        self._of[tenant] += more

    def forget(self, tenant: str, count: int) -> None:
        self._held -= count
        self._of[tenant] -= count
        if not self._of[tenant]:
            del self._of[tenant]

    async def beside(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread. Python changes threads every 5 ms, so that the event loop waits no longer."""
        here = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._reader, here.run, work)
