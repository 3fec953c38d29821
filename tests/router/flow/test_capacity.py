"""What a router makes of the room, the waits and the contexts that workers report."""

import asyncio
from collections.abc import Callable

import pytest
from millrace.v1 import common_pb2, inference_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_router.fleet import worker as worker_module
from millrace_rpc.errors import from_rpc_error
from router.fake_worker import DECODE, PREFILL, UNIFIED, FakeWorker, Outputs, behaviour, expected, hangs, output, waits

PROMPT = [64, 65, 66, 67]


@behaviour
async def tells(worker: FakeWorker, request: worker_pb2.EngineRequest, after: int, go: asyncio.Event) -> Outputs:
    """`after` tokens, then a wait that the worker tells of, then the rest."""
    for i in range(after):
        yield output(request, i)
    stale = common_pb2.AttemptId(room=request.id.room, attempt=request.id.attempt + 1)
    worker.tell(stale, over=False)
    worker.tell(request.id, over=False)
    worker.tell(stale, over=True)
    await go.wait()
    worker.tell(request.id, over=True)
    for i in range(after, 1 if worker.role == PREFILL else 8):
        yield output(request, i, finish=common_pb2.FINISH_REASON_LENGTH if i == 7 else 0)


@pytest.mark.parametrize(
    ("role", "after"),
    [(PREFILL, 0), (DECODE, 0), (DECODE, 3), (UNIFIED, 0), (UNIFIED, 3)],
    ids=["in a prefill queue", "an import without pages", "preempted", "in a queue", "preempted there"],
)
async def test_a_wait_that_a_worker_tells_of_is_no_fault(cluster: Callable, role: int, after: int) -> None:
    """However long it takes."""
    go, roles = asyncio.Event(), (UNIFIED,) if role == UNIFIED else (PREFILL, DECODE)
    made = await cluster(*(FakeWorker(each) for each in roles))
    for worker in made.workers:
        if worker.role == role:
            worker.script.append(tells(after, go))
        elif worker.role == DECODE:
            worker.script.append(waits(go, after=0))  # it has the KV when it is computed
    answer = asyncio.create_task(made.generate(PROMPT))
    await made.until(lambda: bool(made.router.inference.active))
    [stream] = made.router.inference.active
    generation = stream.continuations[0].generation
    await made.until(lambda: generation.flow.waits and len(generation.flow.outputs) >= after)
    generation.flow.progress -= 1000.0
    generation._tick()
    go.set()
    assert (await answer).tokens() == expected(PROMPT, 8)
    assert all(len(worker.submitted) == 1 for worker in made.workers)
    assert made.metric("millrace_retries_total", reason="STALLED") == 0


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


@pytest.mark.parametrize(("claim_s", "kept"), [(1e9, 46), (-1.0, 0)])
async def test_what_was_sent_takes_room_for_a_while(
    cluster: Callable, monkeypatch: pytest.MonkeyPatch, claim_s: float, kept: int
) -> None:
    """The first report after it may have been made before the request came. Capacity and work are the report's."""
    monkeypatch.setattr(worker_module, "CLAIM_S", claim_s)
    made = await cluster(FakeWorker(UNIFIED))
    worker = made.router.registry.workers[made.workers[0].address]
    made.workers[0].change(counts={"room": 100, "expected_output": 6})
    await made.until(lambda: worker.load.replicas[0].HasField("room"))
    (before,) = worker.replicas()
    worker.note_sent(0, 40, 0, 6)
    (sent,) = worker.replicas()
    assert (before.room - sent.room, before.capacity - sent.capacity, sent.tokens - before.tokens) == (46, 1, 40)
    seen = worker.load
    made.workers[0].change(counts={"room": 100, "expected_output": 6, "counters": {"steps": 1}})
    await made.until(lambda: worker.load is not seen)
    (after,) = worker.replicas()
    assert (before.room - after.room, after.capacity, after.tokens) == (kept, before.capacity, before.tokens)


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
