"""The bodies of requests from their first byte until they are read: how many bytes are held, and the thread that reads
the large ones beside the event loop.
"""

import asyncio
import contextlib
import contextvars
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

T = TypeVar("T")


class Bodies:
    def __init__(self, most: int, most_by_tenant: int) -> None:
        self._most = most
        self._most_by_tenant = most_by_tenant
        self._held = 0
        self._of: Counter[str] = Counter()
        # One: it takes turns with the event loop, and every further one would take as many turns as the loop.
        self._reader = ThreadPoolExecutor(1, "reader")

    @contextlib.contextmanager
    def hold(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Yields what counts further bytes of one body until the block ends. It raises OVERLOADED for too many."""
        count = 0

        def take(more: int) -> None:
            nonlocal count
            for have, most, whose in (
                (self._held, self._most, "all clients"),
                (self._of[tenant], self._most_by_tenant, tenant),
            ):
                if have + more > most:
                    text = f"bodies of {whose} that are being received have {most} bytes, the limit"
                    raise MillraceError(Reason.OVERLOADED, text)
            self._held += more
            self._of[tenant] += more
            count += more

        try:
            yield take
        finally:
            self._held -= count
            self._of[tenant] -= count
            if not self._of[tenant]:
                del self._of[tenant]

    async def read(self, work: Callable[[], T], large: bool) -> T:
        """Run `work`, in the thread if it is large. Python changes threads every 5 ms, so that the event loop waits no
        longer.
        """
        if not large:
            return work()
        here = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._reader, here.run, work)
