"""The delay of the event loop: the time that a callback waits for others that do not yield. It delays every request."""

from __future__ import annotations

import asyncio

from millrace_common.metrics import Metrics

INTERVAL_S = 0.1


class LoopLag:
    """Measures from its construction, inside the loop, until `close`."""

    def __init__(self, process: str, metrics: Metrics) -> None:
        self._loop = asyncio.get_running_loop()
        self._observe = metrics.loop_lag.labels(process=process).observe
        self._due = self._loop.time() + INTERVAL_S
        self._timer = self._loop.call_at(self._due, self._look)

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        self._observe(max(now - self._due, 0.0))
        self._due = now + INTERVAL_S
        self._timer = self._loop.call_at(self._due, self._look)
