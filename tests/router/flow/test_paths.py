"""Every path of a request through the router, over gRPC and fake workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from millrace.v1 import common_pb2, inference_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_rpc.errors import from_rpc_error
from router.fake_worker import (
    DECODE,
    PREFILL,
    READY,
    UNIFIED,
    FakeWorker,
    dies,
    expected,
    fails,
    failure,
    hangs,
    normal,
    output,
)
from router.harness import Cluster

PROMPT = [10, 20, 30]
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


async def test_pair(pair: Cluster) -> None:
    result = await pair.generate(PROMPT)
    assert result.tokens() == expected(PROMPT, 8)
    assert result.text() == "".join(chr(token + 33) for token in result.tokens())
    assert result.finish() == LENGTH
    assert result.responses[-1].usage.completion_tokens == 8
    assert result.responses[-1].usage.prompt_tokens == 3
    assert [response.model for response in result.responses] == ["tiny"] + [""] * (len(result.responses) - 1)
    (prefill,), (decode,) = pair.prefills, pair.decodes
    assert prefill.submitted[0].id == decode.submitted[0].id and prefill.submitted[0].id.room != 0
    assert decode.sources[0].address == prefill.address and decode.sources[0].epoch == prefill.epoch
    await pair.quiet()
    assert not prefill.aborted and not decode.aborted
    assert pair.metric("millrace_requests_total", api="grpc", status="ok") == 1
    assert pair.metric("millrace_stage_seconds_count", stage="total") == 1
    assert pair.metric("millrace_tokens_total", direction="output") == 8


async def test_the_client_has_the_first_token_before_the_kv_has_moved(pair: Cluster) -> None:
    go = asyncio.Event()

    async def after(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator:
        await go.wait()
        yield output(request, 0, count=4)
        yield output(request, 4, count=4, finish=LENGTH)

    pair.decodes[0].script.append(after)
    request = inference_pb2.GenerateRequest(
        prompt={"token_ids": {"ids": PROMPT}}, sampling={"max_tokens": 8, "seed": 0}
    )
    call = pair.stub.Generate(request)
    assert list((await call.read()).token_ids) == expected(PROMPT, 1)
    go.set()
    rest: list[int] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        rest += response.token_ids
    assert rest == expected(PROMPT, 8)[1:]
    await pair.quiet()
    assert pair.metric("millrace_stage_seconds_count", stage="kv_transfer") == 1
    assert pair.metric("millrace_inter_token_seconds_count") >= 1


@pytest.mark.parametrize("finish", [0, LENGTH])
async def test_a_prefill_worker_that_is_no_longer_listed_keeps_its_link_until_its_pages_are_read(
    pair: Cluster, finish: int
) -> None:
    """`finish`: the first message of the decode worker has the whole answer."""
    go, registry = asyncio.Event(), pair.router.registry

    async def after(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator:
        await go.wait()
        yield output(request, 0, count=8 if finish else 4, finish=finish)
        if not finish:
            yield output(request, 4, count=4, finish=LENGTH)

    pair.decodes[0].script.append(after)
    running = asyncio.create_task(pair.generate(PROMPT))
    await pair.until(
        lambda: any(s.continuations[0].generation.stage == "handover" for s in pair.router.inference.active)
    )
    (prefill,) = pair.prefills
    leaving = registry.workers[prefill.address]
    registry.on_targets([registry.workers[pair.decodes[0].address].target])
    assert leaving.in_flight == 1 and not registry._tasks[leaving].cancelling()
    go.set()
    assert (await running).tokens() == expected(PROMPT, 8)
    assert not prefill.aborted
    await pair.until(lambda: leaving not in registry._tasks)


async def test_an_answer_in_one_message_has_been_decoded(pair: Cluster) -> None:
    """The stage begins and ends with the same message, and is counted."""
    go = asyncio.Event()

    async def at_once(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator:
        await go.wait()
        yield output(request, 0, count=8, finish=LENGTH)

    pair.decodes[0].script.append(at_once)
    answer = asyncio.create_task(pair.generate(PROMPT))
    await pair.until(lambda: any(s.continuations[0].generation.flow.outputs for s in pair.router.inference.active))
    go.set()
    assert (await answer).tokens() == expected(PROMPT, 8)
    await pair.quiet()
    for stage in ("queue", "route", "prefill", "kv_transfer", "first_token", "decode", "total"):
        assert pair.metric("millrace_stage_seconds_count", stage=stage) == 1, stage


async def test_unified(cluster: Callable) -> None:
    made = await cluster(FakeWorker(UNIFIED))
    assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)
    assert made.workers[0].sources == [None]
    await made.quiet()


async def test_one_token_needs_no_decode_worker(pair: Cluster) -> None:
    result = await pair.generate(PROMPT, sampling={"max_tokens": 1})
    assert result.tokens() == expected(PROMPT, 1) and result.finish() == LENGTH
    assert not pair.decodes[0].submitted
    await pair.quiet()


async def test_several_continuations_have_their_own_seed(pair: Cluster) -> None:
    result = await pair.generate(PROMPT, n=3, sampling={"seed": 2**64 - 1})
    for i, seed in enumerate([2**64 - 1, 0, 1]):
        assert result.tokens(i) == expected(PROMPT, 8, seed)
        assert result.finish(i) == LENGTH
    assert len({request.id.room for request in pair.prefills[0].submitted}) == 3
    await pair.quiet()


async def test_eos_as_first_token_ends_both_legs(pair: Cluster) -> None:
    async def first_is_last(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator:
        yield output(request, 0, finish=STOP)

    pair.prefills[0].script.append(first_is_last)
    pair.decodes[0].script.append(hangs())
    result = await pair.generate(PROMPT)
    assert result.tokens() == expected(PROMPT, 1) and result.finish() == STOP
    await pair.quiet()


async def test_logprobs(pair: Cluster) -> None:
    result = await pair.generate(PROMPT, sampling={"logprobs": 2})
    entries = [entry for response in result.responses for entry in response.logprobs]
    assert [entry.sampled.token_id for entry in entries] == expected(PROMPT, 8)
    assert all(len(entry.top) == 2 for entry in entries)


async def test_stop_string_cuts_and_aborts(pair: Cluster) -> None:
    text = "".join(chr(token + 33) for token in expected(PROMPT, 50))
    stop = text[5:8]
    result = await pair.generate(PROMPT, sampling={"max_tokens": 500}, stop=[stop])
    assert result.text() == text[: text.index(stop)] and result.finish() == STOP
    assert len(result.tokens()) == text.index(stop) + 3 == result.responses[-1].usage.completion_tokens
    await pair.quiet()


# ------------------------------------------------------------------------------------- failures that are cured


async def spare(cluster: Callable, **settings: object) -> Cluster:
    """Two of each. A behaviour appended to the first one's script is used by whichever of the role gets a request."""
    roles = (PREFILL, PREFILL, DECODE, DECODE)
    made = await cluster(*(FakeWorker(role) for role in roles), **settings)
    for workers in (made.prefills, made.decodes):
        workers[1].script = workers[0].script
    return made


async def check_cured(made: Cluster, reason: str, result: object | None = None, length: int = 8) -> None:
    result = result or await made.generate(PROMPT)
    assert result.error is None
    assert result.tokens() == expected(PROMPT, length)
    assert result.finish() == LENGTH
    assert made.metric("millrace_retries_total", reason=reason) >= 1
    await made.quiet()


async def test_prefill_worker_dies_before_first_token(cluster: Callable) -> None:
    made = await spare(cluster)
    made.prefills[0].script.append(dies())
    made.decodes[0].script.append(hangs())
    await check_cured(made, "WORKER_LOST")


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_decode_worker_dies_and_the_stream_goes_on(cluster: Callable, after: int) -> None:
    made = await spare(cluster)
    made.decodes[0].script.append(dies(after))
    await check_cured(made, "WORKER_LOST")
    replays = [request for worker in made.decodes for request in worker.submitted if request.id.attempt > 0]
    assert all(list(replay.token_ids[:3]) == PROMPT for replay in replays)
    assert all(len(replay.token_ids) == 3 + replay.num_prior_outputs for replay in replays)
    assert any(replay.num_prior_outputs >= min(after, 1) for replay in replays)


@pytest.mark.parametrize("reason", ["KV_EXPIRED", "KV_NOT_FOUND", "TRANSFER_FAILED", "EPOCH_CHANGED", "OVERLOADED"])
async def test_decode_worker_reports_a_curable_failure(pair: Cluster, reason: str) -> None:
    """With one worker of each role the same pair is used again."""
    pair.decodes[0].script.append(fails(reason))
    await check_cured(pair, reason)
    assert [request.id.attempt for request in pair.decodes[0].submitted] == [0, 1]


async def test_the_next_attempt_avoids_the_worker_that_failed(cluster: Callable) -> None:
    made = await spare(cluster)
    made.decodes[0].script.extend([fails("DRAINING", after=1), fails("DRAINING", after=1)])
    await check_cured(made, "DRAINING")
    orders = [[request.id.attempt for request in decode.submitted] for decode in made.decodes]
    assert sorted(orders) in ([[0], [1, 2]], [[0, 2], [1]])


async def test_failure_in_mid_stream_is_replayed(pair: Cluster) -> None:
    pair.decodes[0].script.append(fails("DRAINING", after=4))
    await check_cured(pair, "DRAINING")
    assert pair.decodes[0].submitted[1].num_prior_outputs == 4


async def test_replay_of_the_last_token_runs_on_prefill_alone(pair: Cluster) -> None:
    pair.decodes[0].script.append(fails("DRAINING", after=7))
    await check_cured(pair, "DRAINING")
    assert len(pair.decodes[0].submitted) == 1 and len(pair.prefills[0].submitted) == 2


@pytest.mark.parametrize("stage", ["prefill", "handover", "stall"])
async def test_no_progress_starts_another_attempt(cluster: Callable, stage: str) -> None:
    made = await spare(cluster, timeouts={stage: 0.15})
    made.prefills[0].script.append(hangs() if stage == "prefill" else normal)
    made.decodes[0].script.append(hangs(after=3 if stage == "stall" else 0))
    await check_cured(made, "STALLED")
    assert any(worker.aborted for worker in made.decodes)


async def test_first_token_from_the_decode_worker_alone(pair: Cluster) -> None:
    pair.prefills[0].script.append(hangs())
    result = await pair.generate(PROMPT)
    assert result.tokens() == expected(PROMPT, 8)
    await pair.quiet()
    assert pair.prefills[0].aborted, "the prefill leg never ended by itself"


async def test_first_token_of_the_prefill_worker_comes_late(pair: Cluster) -> None:
    go = asyncio.Event()

    async def late(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator:
        await go.wait()
        yield output(request, 0)

    async def waits(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator:
        yield output(request, 0, count=3)
        go.set()
        await asyncio.sleep(0.05)
        yield output(request, 3, count=5, finish=LENGTH)

    pair.prefills[0].script.append(late)
    pair.decodes[0].script.append(waits)
    result = await pair.generate(PROMPT)
    assert result.tokens() == expected(PROMPT, 8)
    await pair.quiet()
    assert not pair.prefills[0].aborted


async def test_duplicates_and_stale_messages_change_nothing(pair: Cluster) -> None:
    async def repeats(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator:
        yield output(request, 0, count=4)
        yield output(request, 2, count=2)
        old = worker_pb2.SequenceOutput(id=request.id, first_index=4, token_ids=[1, 2, 3])
        old.id.attempt = 7
        yield old
        old.id.room = 12345
        yield old
        yield output(request, 4, count=4, finish=LENGTH)
        yield failure(request, "INTERNAL")

    pair.decodes[0].script.append(repeats)
    result = await pair.generate(PROMPT)
    assert result.error is None and result.tokens() == expected(PROMPT, 8)
    # three of the decode worker, and that of the prefill worker where it comes after them
    await pair.until(lambda: pair.metric("millrace_stale_messages_total", kind="output") in (3, 4))
    assert pair.metric("millrace_stale_messages_total", kind="duplicate") == 1
    await pair.quiet()


async def test_a_mismatch_that_was_shown_ends_the_request(pair: Cluster) -> None:
    async def wrong(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator:
        await asyncio.sleep(0.05)  # by then the client has the prefill worker's token
        out = output(request, 0, count=2)
        out.token_ids[0] += 1
        yield out
        await asyncio.Event().wait()

    pair.decodes[0].script.append(wrong)
    result = await pair.generate(PROMPT)
    assert from_rpc_error(result.error).reason is Reason.INTERNAL
    assert result.tokens() == expected(PROMPT, 1)
    assert pair.metric("millrace_token_mismatches_total") == 1
    await pair.quiet()


# ------------------------------------------------------------------------------------- failures that are told


async def check_error(made: Cluster, reason: Reason, **fields: object) -> grpc.aio.AioRpcError:
    result = await made.generate(PROMPT, **fields)
    assert result.error is not None, result.responses
    error = from_rpc_error(result.error)
    assert error.reason is reason, error
    await made.quiet()
    return result.error


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_incurable_failure_is_told_at_once(pair: Cluster, role: str) -> None:
    failing, other = (pair.prefills[0], pair.decodes[0])[:: 1 if role == "prefill" else -1]
    failing.script.append(fails("CONTEXT_TOO_LONG"))
    other.script.append(hangs())
    error = await check_error(pair, Reason.CONTEXT_TOO_LONG)
    assert error.details() == "scripted CONTEXT_TOO_LONG"
    assert len(failing.submitted) == 1


async def test_attempts_are_bounded(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), max_attempts=3)
    made.decodes[0].script.extend([fails("KV_EXPIRED")] * 5)
    await check_error(made, Reason.KV_EXPIRED)
    assert [request.id.attempt for request in made.decodes[0].submitted] == [0, 1, 2]


async def test_no_workers(cluster: Callable) -> None:
    made = await cluster(wait=False)
    await check_error(made, Reason.NO_WORKERS)


async def test_workers_that_come_while_a_request_waits_for_any_are_waited_for(cluster: Callable) -> None:
    """As by a request that came after them: a burst during a start is not refused because it is a burst."""
    prefill, decode = FakeWorker(PREFILL), FakeWorker(DECODE, credits=0)
    decode.state = worker_pb2.WORKER_STATE_WARMING
    made = await cluster(prefill, decode, wait=False, timeouts={"no_workers": 60.0, "queue": 600.0})
    await made.until(lambda: made.router.registry.workers[prefill.address].link)
    waiting = asyncio.create_task(made.generate(PROMPT, timeout=None))
    await made.until(lambda: len(made.router.admission) == 1)
    [stream] = made.router.inference.active
    [generation] = [continuation.generation for continuation in stream.continuations]
    decode.change(state=READY)
    await made.until(lambda: made.router.registry.ready)
    generation.flow.progress -= 61.0
    generation._tick()
    assert not generation.flow.ended
    decode.change(credits=8)
    assert (await waiting).tokens() == expected(PROMPT, 8)


async def test_workers_that_never_pair(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL, layout="a"), FakeWorker(DECODE, layout="b"), wait=False)
    await made.until(lambda: all(worker.link for worker in made.router.registry.workers.values()))
    await check_error(made, Reason.NO_WORKERS)
    assert not made.router.registry.ready


@pytest.mark.parametrize("stage", ["queue", "prefill", "handover", "decode"])
async def test_deadline_at_every_stage(cluster: Callable, stage: str) -> None:
    made = await cluster(FakeWorker(PREFILL, credits=0 if stage == "queue" else 8), FakeWorker(DECODE))
    made.prefills[0].script.append(hangs() if stage == "prefill" else normal)
    made.decodes[0].script.append(hangs(after=2 if stage == "decode" else 0))
    result = await made.generate(PROMPT, timeout=0.2)
    assert result.error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await made.quiet()
    if stage != "queue":
        sent = made.decodes[0].submitted[0]
        assert 0 < sent.timeout_ms <= 210  # gRPC rounds what is left of a deadline up


@pytest.mark.parametrize("after", [0, 2])
async def test_cancel_reaches_both_legs(pair: Cluster, after: int) -> None:
    pair.prefills[0].script.append(hangs())
    pair.decodes[0].script.append(hangs(after))
    request = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(token_ids={"ids": PROMPT}))
    call = pair.stub.Generate(request)
    await pair.until(lambda: pair.prefills[0].active and pair.decodes[0].active)
    if after:
        await call.read()
    call.cancel()
    await pair.quiet()
    for worker in pair.workers:
        assert worker.aborted == [(worker.submitted[0].id.room, 0)]
    assert pair.metric("millrace_requests_total", api="grpc", status="cancelled") == 1


async def test_full_queue(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL, credits=0), FakeWorker(DECODE), queue_size=2)
    waiting = [asyncio.create_task(made.generate(PROMPT)) for _ in range(2)]
    await made.until(lambda: len(made.router.admission) == 2)
    result = await made.generate(PROMPT)
    error = from_rpc_error(result.error)
    assert error.reason is Reason.QUEUE_FULL and error.retry_after_s > 0
    assert result.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    answer = await made.http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    made.prefills[0].change(credits=4)
    assert [(await task).tokens() for task in waiting] == [expected(PROMPT, 8)] * 2


async def test_queue_timeout(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL, credits=0), FakeWorker(DECODE), timeouts={"queue": 0.1})
    await check_error(made, Reason.OVERLOADED)


async def test_priority_goes_first(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL, credits=0), FakeWorker(DECODE))
    tasks = []
    for priority in (0, 5, -5, 5):
        name = f"p{priority}.{len(tasks)}"
        tasks.append(asyncio.create_task(made.generate(PROMPT, priority=priority, request_id=name)))
        await made.until(lambda: len(made.router.admission) == len(tasks))
    made.prefills[0].change(credits=8)
    await asyncio.gather(*tasks)
    assert [request.request_id for request in made.prefills[0].submitted] == ["p5.1", "p5.3", "p0.0", "p-5.2"]


async def test_a_broken_link_is_retried_when_it_is_back(pair: Cluster) -> None:
    """One worker of each role: the request waits for the decode worker's next process."""
    decode = pair.decodes[0]
    decode.script.append(dies(after=3))
    task = asyncio.create_task(pair.generate(PROMPT))
    await pair.until(lambda: decode.dying is not None)
    await decode.dying
    await decode.restart()
    await check_cured(pair, "WORKER_LOST", await task)
    assert decode.submitted[1].num_prior_outputs in (3, 4)


async def test_a_silent_worker_is_lost(cluster: Callable) -> None:
    made = await spare(cluster, timeouts={"silence": 0.5})
    made.decodes[0].script.append(hangs(after=2))
    task = asyncio.create_task(made.generate(PROMPT))
    await made.until(lambda: any(worker.active for worker in made.decodes))
    silent = next(worker for worker in made.decodes if worker.active)
    silent.silent = True
    await check_cured(made, "WORKER_LOST", await task)
