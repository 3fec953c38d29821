"""Connections of the public HTTP server. They end now and then: a new router replica gets its share of the load."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from millrace_rpc.http_server import BoundedHead

MAX_REQUESTS = 10_000  # on one connection


class Ageing(BoundedHead):
    """The answer to a request on an old connection says `connection: close`, which clients expect at any time. uvicorn
    has no option for it: `cycle.keep_alive` is its own, so a new version of uvicorn needs test_connections.py.
    """

    def __init__(self, max_age_s: float | None, parting: asyncio.Event, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parting = parting
        self._left = MAX_REQUESTS
        self._old_at = None if max_age_s is None else self.loop.time() + max_age_s * random.uniform(0.9, 1.1)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._left -= 1
        old = self._old_at is not None and self.loop.time() >= self._old_at
        if old or self._left <= 0 or self._parting.is_set():
            self.cycle.keep_alive = False
