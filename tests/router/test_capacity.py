"""What a router makes of the room, the waits and the contexts that workers report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from millrace.v1 import common_pb2, inference_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_rpc.errors import from_rpc_error
from router.fake_worker import DECODE, PREFILL, UNIFIED, Behaviour, FakeWorker, expected, hangs, normal, output

PROMPT = [64, 65, 66, 67]
SHORT = {"prefill": 0.1, "handover": 0.1, "stall": 0.1}
WAIT_S = 0.6  # much longer than these limits


def waits(after: int) -> Behaviour:
    """`after` tokens, then a wait that the worker tells of, then the rest."""

    async def behave(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator[worker_pb2.SequenceOutput]:
        start = request.num_prior_outputs
        for i in range(start, start + after):
            yield output(request, i)
        worker.tell(
            common_pb2.AttemptId(room=request.id.room, attempt=request.id.attempt + 1), over=False
        )  # a stale one
        worker.tell(request.id, over=False)
        await asyncio.sleep(WAIT_S)
        worker.tell(request.id, over=True)
        if worker.role == PREFILL:
            yield output(request, start)
            return
        for i in range(start + after, request.sampling.max_tokens):
            end = i + 1 == request.sampling.max_tokens
            yield output(request, i, finish=common_pb2.FINISH_REASON_LENGTH if end else 0)

    return behave


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(waits(0), normal), (normal, waits(0)), (normal, waits(3))],
    ids=["in a prefill queue", "an import without pages", "preempted"],
)
async def test_a_wait_that_a_worker_tells_of_is_no_fault(
    cluster: Callable, prefill: Behaviour, decode: Behaviour
) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), timeouts=SHORT)
    made.prefills[0].script.append(prefill)
    made.decodes[0].script.append(decode if prefill is normal else after_prefill)
    assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)
    assert all(len(worker.submitted) == 1 for worker in made.workers)
    assert made.metric("millrace_ejections_total", role="decode", why="consecutive") == 0


async def after_prefill(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator:
    """A decode worker that has the prompt's KV when it has been computed."""
    await asyncio.sleep(WAIT_S)
    async for out in normal(worker, request):
        yield out


@pytest.mark.parametrize("after", [0, 3])
async def test_so_does_a_unified_worker(cluster: Callable, after: int) -> None:
    made = await cluster(FakeWorker(UNIFIED), timeouts=SHORT)
    made.workers[0].script.append(waits(after))
    assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)
    assert len(made.workers[0].submitted) == 1


@pytest.mark.parametrize("role", [PREFILL, DECODE])
async def test_a_request_waits_in_the_router_until_there_is_room(cluster: Callable, role: int) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE))
    full = next(worker for worker in made.workers if worker.role == role)
    full.change(counts={"room": 0, "expected_output": 6})
    worker = made.router.registry.workers[full.address]
    await made.until(lambda: worker.load.replicas[0].HasField("room"))
    task = asyncio.create_task(made.generate(PROMPT))
    await made.until(lambda: len(made.router.admission) == 1)
    if role == DECODE:
        full.change(counts={"room": 9, "expected_output": 6})
        await made.until(lambda: worker.load.replicas[0].room == 9)
        assert len(made.router.admission) == 1, "4 + 6 tokens"
    assert not any(worker.submitted for worker in made.workers)
    full.change(counts={"room": 10, "expected_output": 6})
    assert (await task).tokens() == expected(PROMPT, 8)


async def test_what_was_sent_takes_room_though_a_report_does_not_know_of_it(cluster: Callable) -> None:
    """The first report after it may have been made before the request came."""
    made = await cluster(FakeWorker(UNIFIED))
    worker = made.router.registry.workers[made.workers[0].address]
    made.workers[0].change(counts={"room": 100, "expected_output": 6})
    await made.until(lambda: worker.load.replicas[0].HasField("room"))
    (before,) = worker.replicas(frozenset(), "")
    worker.note_sent(0, 40, 0, 6)
    (sent,) = worker.replicas(frozenset(), "")
    seen = worker.load
    made.workers[0].change(counts={"room": 100, "expected_output": 6, "counters": {"steps": 1}})
    await made.until(lambda: worker.load is not seen)
    assert before.room - sent.room == 46
    (after,) = worker.replicas(frozenset(), "")
    assert after.room in (sent.room, before.room)  # a tenth of a second may have passed


async def test_a_first_burst_is_judged_by_the_speed_that_workers_tell(cluster: Callable) -> None:
    """100 tokens take 50 s. So two more may wait behind the two that run, where 60 s are allowed, and no third one."""
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE))
    decode = made.decodes[0]
    decode.script += [hangs()] * 2
    counts = {"expected_output": 100, "output_tokens_per_s": 2.0}
    decode.change(counts={"room": 2 * 99 + 2 * len(PROMPT), **counts})
    worker = made.router.registry.workers[decode.address]
    await made.until(lambda: worker.load.replicas[0].output_tokens_per_s == 2.0)
    endless = {"sampling": {"max_tokens": 100, "ignore_eos": True}, "timeout": None}
    tasks = [asyncio.create_task(made.generate(PROMPT, **endless)) for _ in range(2)]
    await made.until(lambda: len(decode.submitted) == 2)
    decode.change(counts={"room": 0, "running": 1, **counts})  # older than the second request
    await made.until(lambda: worker.load.replicas[0].room == 0)
    tasks += [asyncio.create_task(made.generate(PROMPT, **endless)) for _ in range(2)]
    await made.until(lambda: len(made.router.admission) == 2)
    refused = await made.generate(PROMPT, **endless)
    assert refused.error is not None
    error = from_rpc_error(refused.error)
    assert error.reason is Reason.QUEUE_FULL and error.retry_after_s == pytest.approx(40, abs=5)
    assert len(made.prefills[0].submitted) == 2, "no prompt of others was computed"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("sampling", "stop", "least"),
    [
        ({}, [], 0),
        ({"min_tokens": 4}, [], 4),
        ({"ignore_eos": True}, [], 9),
        ({"ignore_eos": True, "stop_token_ids": [7]}, [], 0),
        ({"ignore_eos": True}, ["x"], 0),
        ({"min_tokens": 4}, ["x"], 0),
    ],
)
async def test_an_answer_lasts_as_long_as_nothing_ends_it(
    cluster: Callable, sampling: dict, stop: list[str], least: int
) -> None:
    made = await cluster(FakeWorker(UNIFIED))
    await made.generate(PROMPT, sampling={"max_tokens": 9, **sampling}, stop=stop)
    assert made.router.registry.placer.decisions[-1].situation.want.least == least


async def test_the_models_context_is_the_longest_that_some_placement_serves(cluster: Callable) -> None:
    workers = [FakeWorker(PREFILL), FakeWorker(PREFILL), FakeWorker(DECODE), FakeWorker(DECODE)]
    for worker, context in zip(workers, (300, 200, 100, 250), strict=True):
        worker.context = context
    made = await cluster(*workers)

    async def context() -> int:
        return (await made.stub.ListModels(inference_pb2.ListModelsRequest())).models[0].max_context

    assert await context() == 250
    answers = [await made.generate(PROMPT, sampling={"max_tokens": length}) for length in (240, 246, 40, 96) * 2]
    assert [len(answer.tokens()) for answer in answers] == [240, 246, 40, 96] * 2
    lengths = [request.sampling.max_tokens for request in workers[2].submitted]
    assert lengths and max(lengths) <= 96, "the small one gets what fits, and nothing else"
    assert (from_rpc_error((await made.generate(PROMPT, sampling={"max_tokens": 247})).error)).reason is (
        Reason.CONTEXT_TOO_LONG
    )
    await workers[3].stop()
    await made.until(lambda: made.router.registry.model.max_context == 100)
    assert await context() == 100
    error = from_rpc_error((await made.generate(PROMPT, sampling={"max_tokens": 97})).error)
    assert error.reason is Reason.CONTEXT_TOO_LONG and "100" in error.message
