"""Routers side by side that know nothing of each other, in front of the same few places."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.fake_worker import UNIFIED, FakeWorker, expected, fails, normal

PLACES = 2


class Small(FakeWorker):
    """It takes so many requests at once, offers what is left to every router, and refuses more."""

    async def _work(self, key, request, outgoing):
        self.script.append(fails("OVERLOADED") if len(self.active) > PLACES else normal)
        self._offer()
        await super()._work(key, request, outgoing)
        self._offer()

    def _offer(self) -> None:
        self.change(credits=max(PLACES - len(self.active), 0))


class Known(FakeWorker):
    """A worker that another router's fixture has started."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


async def test_nobody_is_refused_because_another_router_was_faster(cluster: Callable) -> None:
    worker, known = Small(UNIFIED, PLACES, step_s=0.002), Known(UNIFIED)
    routers = [await cluster(worker)]
    known.address = worker.address
    routers += [await cluster(known, resilience={"retries": {"ratio": 0, "per_s": 0}}) for _ in range(2)]
    asked = [made.generate([i], timeout=60) for made in routers for i in range(10)]
    for i, result in enumerate(await asyncio.gather(*asked)):
        assert result.error is None and result.tokens() == expected([i % 10], 8)
    assert len(worker.submitted) > len(asked), "they did race"
