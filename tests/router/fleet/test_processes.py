"""Processes of workers that come and go: tables that do not grow, other addresses, other versions of the API."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from millrace.v1 import worker_pb2
from millrace_common.versions import WORKER_API
from millrace_testing.dns import name_server
from millrace_testing.later import later
from router.fake_worker import DECODE, PREFILL, UNIFIED, FakeWorker, expected, fails, normal
from router.fleet.test_workers import detail
from router.harness import Cluster

STARTS = 10


async def test_workers_links_hooks_and_feeds(cluster: Callable) -> None:
    prefill, decode = FakeWorker(PREFILL), FakeWorker(DECODE)
    made: Cluster = await cluster(prefill, decode, prefill_policy="kv_aware", decode_policy="kv_aware")
    registry = made.router.registry
    for start in range(STARTS):
        worker = (prefill, decode)[start % 2]
        await worker.restart()
        living = {prefill.epoch, decode.epoch}
        await made.until(lambda living=living: registry._routable == living)
    assert (await made.generate([1, 2, 3])).error is None
    warmups = registry.warmups
    for table in (warmups.ready, warmups.progress, warmups._tasks, warmups._warming):
        assert len(table) == 1
    for table in (registry.workers, registry._feeds._feeds, registry.health._records, warmups._freezers):
        assert len(table) == 2
    assert not registry._leaving and len(registry._tasks) == 2


# ------------------------------------------------------------------------------------- addresses


PLACES = 2


class Small(FakeWorker):
    """It takes so many requests at once, offers what is left to every router, and refuses more."""

    async def _work(self, key, request, outgoing, source):
        self.script.append(fails("OVERLOADED") if len(self.active) > PLACES else normal)
        self._offer()
        await super()._work(key, request, outgoing, source)
        self._offer()

    def _offer(self) -> None:
        self.change(capacity=max(PLACES - len(self.active), 0))


class Known(FakeWorker):
    """A worker that another router's fixture has started."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


async def test_nobody_is_refused_because_another_router_was_faster(cluster: Callable) -> None:
    worker, known = Small(UNIFIED, PLACES, step_s=0.002), Known(UNIFIED)
    routers = [await cluster(worker)]
    known.address = worker.address
    routers += [await cluster(known, resilience={"retries": {"ratio": 0, "per_s": 0}}) for _ in range(2)]
    asked = [made.generate([i]) for made in routers for i in range(10)]
    for i, result in enumerate(await asyncio.gather(*asked)):
        assert result.error is None and result.tokens() == expected([i % 10], 8)
    assert len(worker.submitted) > len(asked), "they did race"


async def test_a_worker_that_comes_back_at_another_address(cluster: Callable) -> None:
    """In between its name does not exist."""
    worker = FakeWorker(UNIFIED)
    port = int((await worker.start("127.0.0.2:0")).rpartition(":")[2])
    async with name_server() as dns:
        dns.addresses["worker.test"] = "127.0.0.2"
        made = await cluster(workers=(dns.target("worker.test", port),))
        assert (await made.generate([1, 2])).tokens() == expected([1, 2], 8)
        for address in ("127.0.0.3", "127.0.0.4", "127.0.0.2"):
            await worker.stop()
            del dns.addresses["worker.test"]
            await made.until(lambda: not made.router.registry.ready)
            asked = len(dns.asked)
            await made.until(lambda asked=asked: len(dns.asked) > asked)
            worker.epoch += "x"
            await worker.start(f"{address}:{port}")
            dns.addresses["worker.test"] = address
            await made.until(lambda: made.router.registry.ready)
            assert (await made.generate([1, 2])).tokens() == expected([1, 2], 8)
        await worker.stop()


# ------------------------------------------------------------------------------------- versions


BOTH = pytest.mark.parametrize("step", [-1, 1], ids=["older", "newer"])


def of_version(step: int, *roles: int) -> list[FakeWorker]:
    workers = [FakeWorker(role) for role in roles]
    for worker in workers:
        worker.protocol = WORKER_API + step
    return workers


@BOTH
@pytest.mark.parametrize("roles", [(UNIFIED,), (PREFILL, DECODE)], ids=["unified", "pair"])
async def test_the_other_version_gets_nothing_and_ours_serves(
    roles: tuple[int, ...], step: int, cluster: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    others, ours = of_version(step, *roles), [FakeWorker(role) for role in roles]
    said = f"the worker serves version {WORKER_API + step} of the worker API, this router needs {WORKER_API}"
    with caplog.at_level(logging.WARNING):
        made = await cluster(*others, *ours, wait=False)
        await made.until(lambda: made.router.registry.ready)
        for _ in range(4):
            assert (await made.generate([1, 2])).tokens() == expected([1, 2], 8)
        for other in others:
            await made.until(lambda other=other: said in detail(made, other))
            worker = made.router.registry.workers[other.address]
            asked = worker.trouble
            await made.until(lambda worker=worker: worker._pause > 0.3)  # it was asked again, more than once
            assert worker.trouble == asked and not other.hellos and not other.submitted and not other.warmups
    lines = [line for record in caplog.records if "cannot be used" in (line := record.getMessage())]
    assert sorted(lines) == sorted(f"worker {other.address} cannot be used: {said}" for other in others)
    assert not made.router.registry.health.ejected()


class Later(FakeWorker):
    """What it says has fields, and states, that this version does not know."""

    async def GetInfo(self, request: Message, context: Any) -> Message:
        return later(await super().GetInfo(request, context))

    async def WatchLoad(self, request: Message, context: Any) -> AsyncIterator[Message]:
        async for load in super().WatchLoad(request, context):
            yield later(load)

    async def Link(self, requests: Any, context: Any) -> AsyncIterator[Message]:
        async for response in super().Link(requests, context):
            yield later(response)


async def test_unknown_fields_and_states(cluster: Callable) -> None:
    made = await cluster(Later(PREFILL), Later(DECODE))
    for _ in range(3):
        assert (await made.generate([1, 2])).tokens() == expected([1, 2], 8)
    made.decodes[0].change(state=77)
    await made.until(lambda: detail(made, made.decodes[0]) == "77")
    assert not made.router.registry.ready
    made.decodes[0].change(state=worker_pb2.WORKER_STATE_READY)
    await made.until(lambda: made.router.registry.ready)
    assert (await made.generate([1, 2])).tokens() == expected([1, 2], 8)
