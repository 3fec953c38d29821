"""Between a request's arrival and its place in the queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from millrace_common.reasons import Reason
from millrace_router.flow.ask import Ask
from millrace_router.flow.tenant import Bucket, Caller, Tenant, caller
from millrace_rpc.errors import MillraceError
from router.fake_worker import DECODE, PREFILL, FakeWorker, expected
from router.harness import Cluster

PROMPT = [10, 20, 30]


async def test_a_client_that_leaves_while_its_prompt_is_read_is_counted(pair: Cluster) -> None:
    reading = asyncio.Event()

    async def tokenize(prompt: object, model: object) -> list[int]:
        reading.set()
        await asyncio.Event().wait()

    pair.router.inference.tokenize = tokenize
    task = asyncio.create_task(pair.generate(PROMPT))
    await asyncio.wait_for(reading.wait(), 5)
    task.cancel()
    await pair.until(lambda: pair.metric("millrace_requests_total", api="grpc", status="cancelled") == 1)


async def test_who_is_over_its_rate_takes_nobodys_place(cluster: Callable) -> None:
    """Also when it found out only after its prompt was read."""
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE, credits=0), queue_size=1)
    waiting = asyncio.create_task(made.generate(PROMPT))
    await made.until(lambda: len(made.router.admission) == 1)
    greedy = Tenant("greedy", weight=4.0, requests=Bucket(1, 1, time.monotonic()))
    caller.set(Caller(greedy))

    async def tokenize(prompt: object, model: object) -> list[int]:
        greedy.begin(1, time.monotonic())  # another request of it, in the meantime
        return PROMPT

    made.router.inference.tokenize = tokenize
    with pytest.raises(MillraceError) as caught:
        await made.router.inference.generate(Ask(model="", prompt=PROMPT), "grpc")
    assert caught.value.reason is Reason.RATE_LIMITED
    assert len(made.router.admission) == 1
    waiting.cancel()
    await made.quiet()


async def test_a_client_may_be_behind_by_as_many_steps_with_several_continuations(cluster: Callable) -> None:
    """A step of the engine brings a token of each."""
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), limits={"unread": 40})
    ask = Ask(model="", prompt=PROMPT, numbers={"max_tokens": 30, "seed": 0}, n=4)
    stream = (await made.router.inference.generate(ask, "grpc")).stream
    await made.until(lambda: all(one.generation.flow.ended for one in stream.continuations))
    tokens: dict[int, list[int]] = {i: [] for i in range(4)}
    async for delta in stream.deltas():
        tokens[delta.index] += delta.token_ids
    assert tokens == {i: expected(PROMPT, 30, i) for i in range(4)}
    await made.quiet()
