"""Workers of another version of the API beside those of ours, and messages with fields of a later one."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from millrace.v1 import worker_pb2
from millrace_common.reasons import Reason
from millrace_common.versions import WORKER_API
from millrace_rpc.errors import from_rpc_error
from millrace_testing.later import later
from router.fake_worker import DECODE, PREFILL, UNIFIED, FakeWorker, expected
from router.fleet.test_workers import detail

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
        for _ in range(10):
            assert (await made.generate([1, 2])).tokens() == expected([1, 2], 8)
        for other in others:
            await made.until(lambda other=other: said in detail(made, other))
            worker = made.router.registry.workers[other.address]
            asked = worker.trouble
            await made.until(lambda worker=worker: worker._pause > 0.3)  # it was asked again, more than once
            assert worker.trouble == asked and not other.hellos and not other.submitted and not other.warmups
    lines = [line for record in caplog.records if "cannot be used" in (line := record.getMessage())]
    assert sorted(lines) == sorted(f"worker {other.address} cannot be used: {said}" for other in others)
    assert not made.router.registry.health.left_out()


@BOTH
async def test_halves_of_a_pair(step: int, cluster: Callable) -> None:
    """Nothing can serve, and a request says so; the half that comes in our version serves at once."""
    [decode] = of_version(step, DECODE)
    made = await cluster(FakeWorker(PREFILL), decode, wait=False)
    await made.until(lambda: "of the worker API" in detail(made, decode))
    error = from_rpc_error((await made.generate([1])).error)
    assert error.reason is Reason.NO_WORKERS and not made.prefills[0].submitted
    decode.protocol = WORKER_API
    await decode.restart()
    await made.until(lambda: made.router.registry.ready)
    assert (await made.generate([1])).tokens() == expected([1], 8)


@BOTH
async def test_another_layout_of_pages_pairs_with_its_like(step: int, cluster: Callable) -> None:
    """The version of KV is in the layout's fingerprint."""
    workers = [
        FakeWorker(role, layout=f"layout of version {3 + more}") for more in (0, step) for role in (PREFILL, DECODE)
    ]
    made = await cluster(*workers)
    for _ in range(12):
        assert (await made.generate([1, 2])).error is None
    for decode, prefill in zip(made.decodes, made.prefills, strict=True):
        assert decode.warmups == [prefill.epoch]
        assert {source.epoch for source in decode.sources if source is not None} <= {prefill.epoch}


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
