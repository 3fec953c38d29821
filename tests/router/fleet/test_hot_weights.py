"""Workers that pause, and that come back with other weights: what clients get meanwhile."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest
from millrace.v1 import worker_pb2
from millrace_common import pace
from millrace_common.reasons import Reason
from millrace_router.flow.generation import Generation
from millrace_router.health import progress as progress_module
from millrace_rpc.errors import from_rpc_error
from router.fake_worker import DECODE, PREFILL, UNIFIED, FakeWorker, expected, hangs, waits
from router.fleet.test_workers import detail
from router.harness import Cluster
from router.health.test_progress import noted_looks
from router.scripted import HELLO

READY, PAUSED = worker_pb2.WORKER_STATE_READY, worker_pb2.WORKER_STATE_PAUSED


async def reloaded(made: Cluster, worker: FakeWorker, weights: str) -> None:
    """What a worker does with other weights: everything ends, and it has another epoch and another layout."""
    worker.weights, worker.layout = weights, f"layout-of-{weights}"
    worker.state = PAUSED
    await worker.restart()
    worker.change(state=READY)
    assert worker.epoch


def generations(made: Cluster) -> list[Generation]:
    return [one.generation for stream in made.router.inference.active for one in stream.continuations]


def spoken(made: Cluster) -> list[int]:
    return sorted(len(one.flow.outputs) for one in generations(made))


def pass_time(made: Cluster) -> None:
    """Much more than any limit, and every request that a worker has looks at its clock."""
    for one in generations(made):
        if one.flow.open:
            one.flow.progress -= 1000.0
            one._tick()


@pytest.mark.parametrize("listed", [True, False])
async def test_a_pause_is_no_stall_however_long_it_takes(cluster: Callable, listed: bool) -> None:
    """Streams go on where they were; nothing new comes meanwhile. `listed`: by discovery, until the end."""
    unified, go = FakeWorker(UNIFIED), asyncio.Event()
    made: Cluster = await cluster(unified)
    unified.script += [waits(go, after=3), waits(go, after=0)]
    tasks = [asyncio.create_task(made.generate([i])) for i in (1, 2)]
    await made.until(lambda: len(unified.active) == 2 and spoken(made) == [0, 3])
    unified.change(state=PAUSED)
    await made.until(lambda: not made.router.registry.ready)
    assert "paused" in detail(made, unified)
    if listed:
        tasks.append(asyncio.create_task(made.generate([3])))
        await made.until(lambda: len(made.router.admission) == 1)
    else:
        made.router.registry.on_targets([])
    pass_time(made)
    unified.change(state=READY)
    if listed:
        await made.until(lambda: made.router.registry.ready)
        pass_time(made)  # without progress it begins again behind the pause
    go.set()
    for i, task in enumerate(tasks, 1):
        result = await task
        assert result.error is None and result.tokens() == expected([i], 8)
    assert len(unified.submitted) == len(tasks) and not unified.aborted
    assert made.metric("millrace_retries_total", reason="STALLED") == 0


async def test_a_stall_behind_a_pause_is_one(cluster: Callable) -> None:
    pair = FakeWorker(UNIFIED), FakeWorker(UNIFIED)
    made: Cluster = await cluster(*pair)
    for worker in pair:
        worker.script.append(hangs(after=3))
    running = asyncio.create_task(made.generate([1]))
    await made.until(lambda: spoken(made) == [3])
    first, second = pair if pair[0].active else pair[::-1]
    second.script.clear()
    known = made.router.registry.workers[first.address]
    first.change(state=PAUSED)
    await made.until(lambda: known.paused)
    pass_time(made)
    assert not second.submitted
    first.change(state=READY)
    await made.until(lambda: not known.paused)
    known.watch.resumed_at -= 1000.0
    pass_time(made)
    assert (await running).tokens() == expected([1], 8)
    assert made.metric("millrace_retries_total", reason="STALLED") == 1


@pytest.mark.parametrize(("why", "over"), [({"state": PAUSED}, {"state": READY}), ({"busy": True}, {"busy": False})])
async def test_a_decode_worker_that_says_why_it_stands_still_is_not_stuck(
    why: dict[str, Any], over: dict[str, Any], cluster: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at many times, for longer than a worker may be silent that does not say why."""
    looks = noted_looks(monkeypatch)
    monkeypatch.setattr(progress_module, "TICK_S", 0.01)
    monkeypatch.setattr(pace, "LEAST_S", 0.05)
    prefill, decode, go = FakeWorker(PREFILL), FakeWorker(DECODE), asyncio.Event()
    decode.change(busy=True)  # until the test begins
    made: Cluster = await cluster(prefill, decode, timeouts={"stall": 0.1})
    decode.script.append(waits(go, after=3))
    running = asyncio.create_task(made.generate([1]))
    await made.until(lambda: spoken(made) == [3])
    decode.change(**({"busy": False} | why))
    seen = len(looks)
    await made.until(lambda: len(looks) > seen + 5 and looks[-1] - looks[seen] > 0.3)
    assert len(decode.links) == 1 and not running.done()
    decode.change(busy=False)
    go.set()
    decode.change(**over)
    result = await running
    assert result.error is None and result.tokens() == expected([1], 8) and len(decode.submitted) == 1


async def test_a_pause_does_not_slow_the_queue_down_afterwards(cluster: Callable) -> None:
    """Requests whose deadlines are soon would be refused."""
    unified = FakeWorker(UNIFIED, capacity=0)
    made: Cluster = await cluster(unified)
    now = time.monotonic()
    made.router.admission._clock = lambda: now
    waiting = asyncio.create_task(made.generate([1]))
    await made.until(lambda: len(made.router.admission) == 1)
    unified.change(state=PAUSED)
    await made.until(lambda: not made.router.registry.ready)
    now += 10.0
    assert made.router.admission.drained_in() > 9.9  # a sum of floats
    unified.change(state=READY)
    await made.until(lambda: made.router.registry.ready)
    assert made.router.admission.drained_in() is None, "nothing was served yet, and nobody has waited long"
    unified.change(capacity=8)
    assert (await waiting).tokens() == expected([1], 8)


async def test_what_a_client_has_seen_is_of_one_version(cluster: Callable) -> None:
    """What has begun with the old weights ends with an error that says so; the others begin with the new ones."""
    unified = FakeWorker(UNIFIED)
    made: Cluster = await cluster(unified)
    assert {r.weights_version for r in (await made.generate([9])).responses[:-1]} == {""}
    unified.script += [hangs(after=3), hangs()]
    begun = asyncio.create_task(made.generate([1]))
    await made.until(lambda: len(unified.active) == 1)  # it has the first line of the script
    silent = asyncio.create_task(made.generate([2]))
    await made.until(lambda: not unified.script)  # a task that is cancelled before it runs would leave its line there
    await made.until(lambda: sum(spoken(made)) == 3)
    await reloaded(made, unified, "weights-b")
    result = await begun
    assert result.error is not None and result.error.code() is grpc.StatusCode.UNAVAILABLE
    assert from_rpc_error(result.error).reason is Reason.NO_WORKERS
    assert "weights changed from version a to b" in result.error.details()
    assert result.tokens() == expected([1], 3)
    result = await silent
    assert result.tokens() == expected([2], 8) and result.responses[-1].weights_version == "b"


async def test_all_continuations_of_a_request_are_of_one_version(cluster: Callable) -> None:
    """One has begun with the old weights and goes on with them elsewhere, and so does the other."""
    old, new = FakeWorker(UNIFIED), FakeWorker(UNIFIED)
    made: Cluster = await cluster(old, new)
    go, workers = asyncio.Event(), [old, new]
    for worker in workers:
        worker.script += [waits(go, after=1), waits(go, after=1)]
    both = asyncio.create_task(made.generate([1], n=2))
    await made.until(lambda: len(old.active) == len(new.active) == 1)
    await made.until(lambda: spoken(made) == [1, 1])
    new.script.clear()
    await reloaded(made, new, "weights-b")
    go.set()
    result = await both
    assert result.error is None
    for index in range(2):
        assert result.tokens(index) == expected([1], 8, seed=index) and result.of(index)[-1].weights_version == "a"
    assert len(old.submitted) == 2, "the second one went on where the first weights are"


async def test_a_late_continuation_begins_with_the_weights_of_its_request(cluster: Callable) -> None:
    """The two were placed before either had begun; one of their workers then has other weights."""
    first, second, go = FakeWorker(UNIFIED), FakeWorker(UNIFIED), asyncio.Event()
    made: Cluster = await cluster(first, second)
    for worker in (first, second):
        worker.script.append(waits(go, after=0))
    both = asyncio.create_task(made.generate([1], n=2))
    await made.until(lambda: len(first.active) == len(second.active) == 1)
    answer = generations(made)[0].job.answer
    answer.weights, answer.version = "weights-a", "a"
    late = next(one for one in generations(made) if one._links)
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
    waiting = asyncio.create_task(made.generate([1]))
    await made.until(lambda: len(made.router.admission) == 1)
    await reloaded(made, decode, "weights-b")
    result = await waiting
    assert result.error is None
    assert result.tokens() == expected([1], 8) and result.responses[-1].weights_version == "b"


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
    async with httpx.AsyncClient(base_url=made.url, timeout=None) as client:
        answer = await client.post(path, json=body)
        assert answer.json()["system_fingerprint"] == "a"
        lines = (await client.post(path, json={**body, "stream": True})).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    answers = [event[where] for event in events if where in event] if where else events
    assert answers and all(event["system_fingerprint"] == "a" for event in answers)
