"""The delay of the event loop: the time that a callback waits for others that do not yield. It delays every request."""

import asyncio

from millrace_common.metrics import Metrics

INTERVAL_S = 0.1


async def measure(process: str, metrics: Metrics) -> None:
    """Measure until cancelled."""
    observe = metrics.loop_lag.labels(process=process).observe
    now = asyncio.get_running_loop().time
    while True:
        due = now() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        observe(max(now() - due, 0.0))
