"""Workers that pause, and that come back with other weights: what clients get meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import httpx
import pytest
from millrace.v1 import worker_pb2
from millrace_common.pace import LEAST_S
from millrace_common.reasons import Reason
from millrace_rpc.errors import from_rpc_error
from router.fake_worker import DECODE, PREFILL, UNIFIED, Behaviour, FakeWorker, expected, fails, hangs, output
from router.fleet.test_workers import detail
from router.harness import Cluster
from router.scripted import HELLO

READY, PAUSED = worker_pb2.WORKER_STATE_READY, worker_pb2.WORKER_STATE_PAUSED


def waits(event: asyncio.Event, after: int) -> Behaviour:
    """`after` tokens; the rest once the event is set."""

    async def behave(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator[worker_pb2.SequenceOutput]:
        for i in range(request.num_prior_outputs, request.sampling.max_tokens):
            if i == after:
                await event.wait()
            yield output(request, i, finish=2 if i + 1 == request.sampling.max_tokens else 0)

    return behave


async def reloaded(made: Cluster, worker: FakeWorker, weights: str) -> None:
    """What a worker does with other weights: everything ends, and it has another epoch and another layout."""
    worker.weights, worker.layout = weights, f"layout-of-{weights}"
    worker.state = PAUSED
    await worker.restart()
    worker.change(state=READY)
    assert worker.epoch


async def test_a_pause_is_neither_a_hang_nor_a_stall(cluster: Callable) -> None:
    """Streams go on where they were, however long it took; nothing new comes meanwhile."""
    unified, go = FakeWorker(UNIFIED), asyncio.Event()
    made: Cluster = await cluster(unified, timeouts={"stall": 1.5, "prefill": 1.5})
    unified.script += [waits(go, after=3), waits(go, after=0)]
    begun = asyncio.create_task(made.generate([1], timeout=60))
    silent = asyncio.create_task(made.generate([2], timeout=60))
    await made.until(lambda: len(unified.active) == 2)
    unified.change(state=PAUSED)
    await made.until(lambda: not made.router.registry.ready)
    assert "paused" in detail(made, unified)
    late = asyncio.create_task(made.generate([3], timeout=60))
    await asyncio.sleep(LEAST_S + 0.5)
    assert len(unified.submitted) == 2 and not begun.done() and not silent.done() and not late.done()
    unified.change(state=READY)
    go.set()
    for task, prompt in ((begun, [1]), (silent, [2]), (late, [3])):
        result = await task
        assert result.error is None and result.tokens() == expected(prompt, 8)
    assert len(unified.submitted) == 3 and not unified.aborted
    assert made.metric("millrace_retries_total", reason="STALLED") == 0


@pytest.mark.parametrize(("why", "over"), [({"state": PAUSED}, {"state": READY}), ({"busy": True}, {"busy": False})])
async def test_a_decode_worker_that_says_why_it_stands_still_is_not_stuck(
    why: dict[str, Any], over: dict[str, Any], cluster: Callable
) -> None:
    """Its streams make no progress for longer than a worker may be silent that does not say why."""
    prefill, decode, go = FakeWorker(PREFILL), FakeWorker(DECODE), asyncio.Event()
    made: Cluster = await cluster(prefill, decode, timeouts={"stall": 1.0})
    decode.script.append(waits(go, after=3))
    running = asyncio.create_task(made.generate([1], timeout=60))
    await made.until(lambda: any(len(s.continuations[0].generation.flow.outputs) == 3 for s in active(made)))
    epoch = decode.epoch
    decode.change(**why)
    await asyncio.sleep(2.5)
    assert len(decode.links) == 1 and not running.done() and decode.epoch == epoch
    decode.change(**over)
    go.set()
    result = await running
    assert result.error is None and result.tokens() == expected([1], 8) and len(decode.submitted) == 1


async def test_a_pause_does_not_slow_the_queue_down_afterwards(cluster: Callable) -> None:
    """Requests whose deadlines are soon would be refused."""
    unified = FakeWorker(UNIFIED, credits=0)
    made: Cluster = await cluster(unified)
    waiting = asyncio.create_task(made.generate([1], timeout=60))
    await made.until(lambda: len(made.router.admission) == 1)
    unified.change(state=PAUSED)
    await made.until(lambda: not made.router.registry.ready)
    await asyncio.sleep(1.0)
    assert made.router.admission.drained_in() >= 1.0
    unified.change(state=READY)
    await made.until(lambda: made.router.registry.ready)
    assert made.router.admission.drained_in() is None, "nothing was served yet, and nobody has waited long"
    unified.change(credits=8)
    assert (await waiting).tokens() == expected([1], 8)


async def test_the_time_without_progress_begins_again_behind_a_pause(cluster: Callable) -> None:
    """However little of that time was left when the pause began."""
    unified, go = FakeWorker(UNIFIED), asyncio.Event()
    made: Cluster = await cluster(unified, timeouts={"stall": 2.0})
    unified.script.append(waits(go, after=3))
    running = asyncio.create_task(made.generate([1], timeout=60))
    await made.until(lambda: any(len(s.continuations[0].generation.flow.outputs) == 3 for s in active(made)))
    unified.change(state=PAUSED)
    await asyncio.sleep(1.5)
    unified.change(state=READY)
    await asyncio.sleep(1.0)
    go.set()
    result = await running
    assert result.error is None and result.tokens() == expected([1], 8) and len(unified.submitted) == 1


async def test_a_pause_of_a_worker_that_is_no_longer_listed_is_no_stall(cluster: Callable) -> None:
    unified, go = FakeWorker(UNIFIED), asyncio.Event()
    made: Cluster = await cluster(unified)
    registry = made.router.registry
    unified.script.append(waits(go, after=3))
    running = asyncio.create_task(made.generate([1], timeout=60))
    await made.until(lambda: any(len(s.continuations[0].generation.flow.outputs) == 3 for s in active(made)))
    (stream,) = active(made)
    generation = stream.continuations[0].generation
    unified.change(state=PAUSED)
    await made.until(lambda: registry.workers[unified.address].paused)
    registry.on_targets([])
    generation.flow.progress -= 2 * generation.flow.timeouts.stall
    generation._tick()
    unified.change(state=READY)
    go.set()
    result = await running
    assert result.error is None and result.tokens() == expected([1], 8)


async def test_a_stall_behind_the_pause_is_one(cluster: Callable) -> None:
    pair = FakeWorker(UNIFIED), FakeWorker(UNIFIED)
    made: Cluster = await cluster(*pair, timeouts={"stall": 0.3})
    for worker in pair:
        worker.script.append(hangs(after=3))
    running = asyncio.create_task(made.generate([1], timeout=60))
    await made.until(lambda: any(worker.active for worker in pair))
    first, second = pair if pair[0].active else pair[::-1]
    second.script.clear()
    first.change(state=PAUSED)
    await asyncio.sleep(1.0)
    assert not running.done() and not second.submitted
    first.change(state=READY)
    assert (await running).tokens() == expected([1], 8)
    assert made.metric("millrace_retries_total", reason="STALLED") == 1


async def test_what_a_client_has_seen_is_of_one_version(cluster: Callable) -> None:
    """What has begun with the old weights ends with an error that says so; the others begin with the new ones."""
    unified = FakeWorker(UNIFIED)
    made: Cluster = await cluster(unified)
    assert {r.weights_version for r in (await made.generate([9])).responses[:-1]} == {""}
    unified.script += [hangs(after=3), hangs()]
    begun = asyncio.create_task(made.generate([1], timeout=60))
    await made.until(lambda: len(unified.active) == 1)  # it has the first line of the script
    silent = asyncio.create_task(made.generate([2], timeout=60))
    await made.until(lambda: not unified.script)  # a task that is cancelled before it runs would leave its line there
    await made.until(lambda: sum(len(s.continuations[0].generation.flow.outputs) for s in active(made)) == 3)
    await reloaded(made, unified, "weights-b")
    result = await begun
    assert result.error is not None and result.error.code() is grpc.StatusCode.UNAVAILABLE
    assert from_rpc_error(result.error).reason is Reason.NO_WORKERS
    assert "weights changed from version a to b" in result.error.details()
    assert result.tokens() == expected([1], 3)
    result = await silent
    assert result.tokens() == expected([2], 8) and result.responses[-1].weights_version == "b"


def active(made: Cluster) -> set:
    return made.router.inference.active


async def test_all_continuations_of_a_request_are_of_one_version(cluster: Callable) -> None:
    """One has begun with the old weights and goes on with them elsewhere, and so does the other."""
    old, new = FakeWorker(UNIFIED), FakeWorker(UNIFIED)
    made: Cluster = await cluster(old, new)
    go, workers = asyncio.Event(), [old, new]
    for worker in workers:
        worker.script += [waits(go, after=1), waits(go, after=1)]
    both = asyncio.create_task(made.generate([1], timeout=60, n=2))
    await made.until(lambda: len(old.active) == len(new.active) == 1)
    await made.until(lambda: all(len(c.generation.flow.outputs) == 1 for s in active(made) for c in s.continuations))
    new.script.clear()
    await reloaded(made, new, "weights-b")
    go.set()
    result = await both
    assert result.error is None
    for index in range(2):
        assert result.tokens(index) == expected([1], 8, seed=index) and result.of(index)[-1].weights_version == "a"
    assert len(old.submitted) == 2, "the second one went on where the first weights are"


async def test_a_continuation_that_begins_late_begins_with_the_weights_of_its_request(cluster: Callable) -> None:
    """The two were placed before either had begun; one of their workers then has other weights."""
    first, second, go = FakeWorker(UNIFIED), FakeWorker(UNIFIED), asyncio.Event()
    made: Cluster = await cluster(first, second)
    for worker in (first, second):
        worker.script.append(waits(go, after=0))
    both = asyncio.create_task(made.generate([1], timeout=60, n=2))
    await made.until(lambda: len(first.active) == len(second.active) == 1)
    begun = next(iter(active(made))).continuations[0].generation.job.begun
    begun.weights, begun.version = "weights-a", "a"
    late = next(c.generation for s in active(made) for c in s.continuations if c.generation._links)
    late._weights = "weights-b"  # as if its worker had had them
    go.set()
    result = await both
    assert result.error is None and all(result.tokens(index) == expected([1], 8, seed=index) for index in range(2))
    assert len(first.submitted) + len(second.submitted) == 3
    assert len(first.aborted) + len(second.aborted) == 1


async def test_a_pair_of_two_versions_is_none(cluster: Callable) -> None:
    prefill, decode = FakeWorker(PREFILL), FakeWorker(DECODE)
    made: Cluster = await cluster(prefill, decode)
    await reloaded(made, prefill, "weights-b")
    await made.until(lambda: not made.router.registry.ready)
    await made.until(lambda: "equal KV layout" in detail(made, prefill))
    decode.change(state=PAUSED)
    await made.until(lambda: made.router.registry.will_be_ready)
    waiting = asyncio.create_task(made.generate([1], timeout=60))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await reloaded(made, decode, "weights-b")
    result = await waiting
    assert result.error is None
    assert result.tokens() == expected([1], 8) and result.responses[-1].weights_version == "b"


async def test_an_attempt_that_a_pause_dropped_is_tried_elsewhere(cluster: Callable) -> None:
    pair = FakeWorker(UNIFIED), FakeWorker(UNIFIED)
    made: Cluster = await cluster(*pair)
    for worker in pair:
        worker.script.append(fails("NOT_READY", after=3))
    result = await made.generate([1])
    assert result.error is None and result.tokens() == expected([1], 8)


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/v1/completions", {"prompt": [1]}, ""),
        ("/v1/chat/completions", {"messages": HELLO}, ""),
        ("/v1/responses", {"input": "Hello"}, "response"),
        ("/v1/messages", {"messages": HELLO}, "message"),
    ],
)
async def test_answers_have_the_version_as_fingerprint(
    path: str, body: dict[str, Any], where: str, cluster: Callable
) -> None:
    """`where`: in an event of a stream, the field with the answer; the event itself is one without it."""
    made: Cluster = await cluster(FakeWorker(UNIFIED))
    body = {"model": "tiny", ("max_output_tokens" if where == "response" else "max_tokens"): 3, **body}
    async with httpx.AsyncClient(base_url=made.url) as client:
        answer = await client.post(path, json=body)
        assert answer.json()["system_fingerprint"] == "a"
        lines = (await client.post(path, json={**body, "stream": True})).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    answers = [event[where] for event in events if where in event] if where else events
    assert answers and all(event["system_fingerprint"] == "a" for event in answers)
