"""Every path of a request through the router, over gRPC and fake workers: what is done, told and counted."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest
from millrace.v1 import common_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError, from_rpc_error
from millrace_testing import HANG_S
from router.fake_worker import (
    DECODE,
    PREFILL,
    READY,
    Behaviour,
    FakeWorker,
    Outputs,
    behaviour,
    dies,
    expected,
    fails,
    failure,
    hangs,
    normal,
    output,
)  # fmt: skip
from router.harness import Cluster, Result, request_of

PROMPT = [10, 20, 30]
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
STAGES = ("route", "queue", "prefill", "first_token", "kv_transfer", "decode", "total")


@behaviour
async def says(
    worker: FakeWorker, request: worker_pb2.EngineRequest, *steps: tuple[int, int] | asyncio.Event
) -> Outputs:
    """Tokens of each (first, count), and waits between them. The last ones end the answer."""
    for step in steps:
        if isinstance(step, asyncio.Event):
            await step.wait()
        else:
            yield output(request, *step, finish=LENGTH if sum(step) == request.sampling.max_tokens else 0)


def in_stages(made: Cluster) -> set[str]:
    counts = {stage: made.metric("millrace_stage_seconds_count", stage=stage) for stage in STAGES}
    assert set(counts.values()) <= {0, 1}
    return {stage for stage, count in counts.items() if count}


def flows(made: Cluster) -> list[Any]:
    return [one.generation.flow for stream in made.router.inference.active for one in stream.continuations]


async def spare(cluster: Callable, count: int = 2, **settings: object) -> Cluster:
    """So many of each. A behaviour appended to the first one's script is for whichever of the role gets a request."""
    made = await cluster(*(FakeWorker(role) for role in (PREFILL, DECODE) for _ in range(count)), **settings)
    for workers in (made.prefills, made.decodes):
        for worker in workers[1:]:
            worker.script = workers[0].script
    return made


async def test_a_pair_answers_and_everything_is_counted_once(pair: Cluster) -> None:
    go = asyncio.Event()
    pair.decodes[0].script.append(says(go, (0, 8)))
    running = asyncio.create_task(pair.generate(PROMPT))
    await pair.until(lambda: any(flow.stage == "handover" for flow in flows(pair)))
    go.set()  # the prefill worker was heard first
    result = await running
    assert result.tokens() == expected(PROMPT, 8) and result.finish() == LENGTH
    assert result.text() == "".join(chr(token + 33) for token in result.tokens())
    usage = result.responses[-1].usage
    assert (usage.completion_tokens, usage.prompt_tokens, usage.drafted_tokens) == (8, 3, 0)
    assert [response.model for response in result.responses] == ["tiny"] + [""] * (len(result.responses) - 1)
    (prefill,), (decode,) = pair.prefills, pair.decodes
    assert prefill.submitted[0].id == decode.submitted[0].id and prefill.submitted[0].id.room != 0
    assert decode.sources[0].address == prefill.address and decode.sources[0].epoch == prefill.epoch
    assert all(0.8 < one.submitted[0].timeout_ms / 1000 / HANG_S <= 1.01 for one in (prefill, decode))
    await pair.quiet()
    assert not prefill.aborted and not decode.aborted and in_stages(pair) == {*STAGES}
    assert pair.metric("millrace_requests_total", api="grpc", status="ok") == 1
    assert pair.metric("millrace_tokens_total", direction="output") == 8


async def test_a_first_token_comes_before_the_kv_has_moved(pair: Cluster) -> None:
    go = asyncio.Event()
    pair.decodes[0].script.append(says(go, (0, 4), (4, 4)))
    call = pair.stub.Generate(request_of(PROMPT))
    assert list((await call.read()).token_ids) == expected(PROMPT, 1)
    go.set()
    rest: list[int] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        rest += response.token_ids
    assert rest == expected(PROMPT, 8)[1:]
    await pair.quiet()
    assert in_stages(pair) == {*STAGES} and pair.metric("millrace_inter_token_seconds_count") >= 1


@pytest.mark.parametrize("whole", [False, True])
async def test_a_prefill_worker_no_longer_listed_keeps_its_link_for_readers(pair: Cluster, whole: bool) -> None:
    """`whole`: the decode worker's first message has the whole answer, and begins and ends the stage."""
    go, registry = asyncio.Event(), pair.router.registry
    pair.decodes[0].script.append(says(go, (0, 8)) if whole else says(go, (0, 4), (4, 4)))
    running = asyncio.create_task(pair.generate(PROMPT))
    await pair.until(lambda: any(flow.stage == "handover" for flow in flows(pair)))
    (prefill,) = pair.prefills
    leaving = registry.workers[prefill.address]
    registry.on_targets([registry.workers[pair.decodes[0].address].target])
    assert leaving.in_flight == 1 and not registry._tasks[leaving].cancelling()
    go.set()
    assert (await running).tokens() == expected(PROMPT, 8)
    assert not prefill.aborted and in_stages(pair) == {*STAGES}
    await pair.until(lambda: leaving not in registry._tasks)


async def test_one_token_needs_no_decode_worker(pair: Cluster) -> None:
    result = await pair.generate(PROMPT, sampling={"max_tokens": 1})
    assert result.tokens() == expected(PROMPT, 1) and result.finish() == LENGTH
    assert not pair.decodes[0].submitted
    await pair.quiet()


async def test_continuations_have_seeds_of_their_own_and_count_as_many(pair: Cluster) -> None:
    result = await pair.generate(PROMPT, n=3, sampling={"seed": 2**64 - 1})
    for i, seed in enumerate([2**64 - 1, 0, 1]):
        assert result.tokens(i) == expected(PROMPT, 8, seed) and result.finish(i) == LENGTH
    assert len({request.id.room for request in pair.prefills[0].submitted}) == 3
    await pair.quiet()
    for name, labels in (("millrace_tokens_total", {}), ("millrace_tenant_tokens_total", {"tenant": "default"})):
        assert pair.metric(name, direction="prompt", **labels) == 3 * len(PROMPT), name


async def test_an_end_as_first_token_ends_both_subs(pair: Cluster) -> None:
    async def first_is_last(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator:
        yield output(request, 0, finish=STOP)

    pair.prefills[0].script.append(first_is_last)
    pair.decodes[0].script.append(hangs())
    result = await pair.generate(PROMPT)
    assert result.tokens() == expected(PROMPT, 1) and result.finish() == STOP
    await pair.quiet()


# ------------------------------------------------------------------------------------- failures that are cured

GRAMMAR = common_pb2.Grammar(regex="[a-z]+")
CURED: dict[str, tuple[Behaviour | None, Behaviour | None, str]] = {  # what the two workers do first, and the reason
    "a prefill worker dies before a token": (dies(), hangs(), "WORKER_LOST"),
    **{f"a decode worker dies after {n}": (None, dies(n), "WORKER_LOST") for n in (0, 1, 5, 7)},
    **{
        f"a decode worker tells {reason}": (None, fails(reason), reason)
        for reason in ("KV_EXPIRED", "KV_NOT_FOUND", "TRANSFER_FAILED", "EPOCH_CHANGED", "OVERLOADED")
    },
    "a worker leaves in mid-stream": (None, fails("DRAINING", after=4), "DRAINING"),
}


def check_cured(made: Cluster, result: Result, reason: str, seed: int = 0, length: int = 8) -> None:
    """The answer is as of one worker, and every replay was the same request with what had been said."""
    assert result.error is None and result.finish() == LENGTH
    assert result.tokens() == expected(PROMPT, length, seed)
    assert made.metric("millrace_retries_total", reason=reason) >= 1
    for workers in (made.prefills, made.decodes):
        asked = [request for worker in workers for request in worker.submitted]
        for again in asked:
            assert again.sampling == asked[0].sampling and again.id.room == asked[0].id.room
            assert list(again.token_ids) == PROMPT + result.tokens()[: again.num_prior_outputs]


@pytest.mark.parametrize("name", CURED)
async def test_a_failure_is_cured_by_another_attempt(cluster: Callable, name: str) -> None:
    prefill, decode, reason = CURED[name]
    made = await spare(cluster)
    made.prefills[0].script += [prefill] if prefill else []
    made.decodes[0].script += [decode] if decode else []
    check_cured(made, await made.generate(PROMPT), reason)
    await made.quiet()


@pytest.mark.parametrize("after", [1, 19])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1.0, "seed": 77}, {"logprobs": 2, "seed": 5}, {"grammar": GRAMMAR}],
    ids=["seeded", "logprobs", "grammar"],
)
async def test_a_continuation_elsewhere_is_identical(cluster: Callable, sampling: dict[str, Any], after: int) -> None:
    """Same seed, positions that go on, the grammar with what it has matched, log-probabilities once for each token."""
    made = await spare(cluster)
    made.decodes[0].script.append(dies(after))
    result = await made.generate(PROMPT, sampling={"max_tokens": 20, **sampling})
    check_cured(made, result, "WORKER_LOST", sampling.get("seed", 0), 20)
    entries = [entry for response in result.responses for entry in response.logprobs]
    if "logprobs" in sampling:
        assert [entry.sampled.token_id for entry in entries] == result.tokens()
        assert all(len(entry.top) == 2 for entry in entries)
    await made.quiet()


async def test_an_attempt_avoids_every_worker_that_failed(cluster: Callable) -> None:
    """Though the third one is the busiest."""
    made = await spare(cluster, 3)
    made.decodes[2].change(counts={"pages_running": 100})
    known = made.router.registry.workers
    await made.until(lambda: known[made.decodes[2].address].load.replicas[0].pages_running == 100)
    made.decodes[0].script += [fails("DRAINING", after=1), fails("DRAINING", after=1)]
    check_cured(made, await made.generate(PROMPT), "DRAINING")
    orders = [[request.id.attempt for request in decode.submitted] for decode in made.decodes]
    assert sorted(orders[:2]) == [[0], [1]] and orders[2] == [2]


async def test_a_replay_of_the_last_token_runs_on_prefill_alone(pair: Cluster) -> None:
    pair.decodes[0].script.append(fails("DRAINING", after=7))
    check_cured(pair, await pair.generate(PROMPT), "DRAINING")
    assert len(pair.decodes[0].submitted) == 1 and len(pair.prefills[0].submitted) == 2


@pytest.mark.parametrize("stage", ["prefill", "handover", "stall"])
async def test_no_progress_starts_another_attempt(cluster: Callable, stage: str) -> None:
    made = await spare(cluster, timeouts={stage: HANG_S})
    made.prefills[0].script.append(hangs() if stage == "prefill" else normal)
    made.decodes[0].script.append(hangs(after=3 if stage == "stall" else 0))
    running, said = asyncio.create_task(made.generate(PROMPT)), {"prefill": 0, "handover": 1, "stall": 3}[stage]
    await made.until(lambda: any(worker.submitted for worker in made.decodes))
    await made.until(lambda: [len(flow.outputs) for flow in flows(made)] == [said])
    (generation,) = (one.generation for stream in made.router.inference.active for one in stream.continuations)
    generation.flow.progress -= HANG_S  # as after so long without progress
    generation._arm()
    check_cured(made, await running, "STALLED")
    await made.quiet()
    assert any(worker.aborted for worker in made.decodes)


async def test_a_first_token_may_come_from_the_decode_worker_alone(pair: Cluster) -> None:
    pair.prefills[0].script.append(hangs())
    assert (await pair.generate(PROMPT)).tokens() == expected(PROMPT, 8)
    await pair.quiet()
    assert pair.prefills[0].aborted, "the prefill sub-request never ended by itself"
    assert in_stages(pair) == {*STAGES}, "a handover that takes no time counts"


async def test_a_late_first_token_of_the_prefill_worker_is_taken(pair: Cluster) -> None:
    begun, said = asyncio.Event(), asyncio.Event()

    async def late(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator:
        await begun.wait()
        yield output(request, 0)
        said.set()

    async def waits(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator:
        yield output(request, 0, count=3)
        begun.set()
        await said.wait()
        await pair.until(lambda: "prefill" not in flows(pair)[0].open)
        yield output(request, 3, count=5, finish=LENGTH)

    pair.prefills[0].script.append(late)
    pair.decodes[0].script.append(waits)
    assert (await pair.generate(PROMPT)).tokens() == expected(PROMPT, 8)
    await pair.quiet()
    assert not pair.prefills[0].aborted


async def test_repeated_and_stale_messages_change_nothing(pair: Cluster) -> None:
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
        await pair.until(lambda: flows(pair)[0].taken == 1)  # the client has the prefill worker's token
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


async def test_a_broken_link_is_retried_when_it_is_back(pair: Cluster) -> None:
    """One worker of each role: the request waits for the decode worker's next process."""
    decode = pair.decodes[0]
    decode.script.append(dies(after=3))
    task = asyncio.create_task(pair.generate(PROMPT))
    await pair.until(lambda: decode.dying is not None)
    await decode.dying
    await decode.restart()
    check_cured(pair, await task, "WORKER_LOST")
    assert decode.submitted[1].num_prior_outputs in (3, 4)


async def test_a_silent_worker_is_lost(cluster: Callable) -> None:
    made = await spare(cluster, timeouts={"silence": 0.5})
    made.decodes[0].script.append(hangs(after=2))
    task = asyncio.create_task(made.generate(PROMPT))
    await made.until(lambda: any(worker.active for worker in made.decodes))
    next(worker for worker in made.decodes if worker.active).silent = True
    check_cured(made, await task, "WORKER_LOST")


# ------------------------------------------------------------------------------------- failures that are told


async def told(made: Cluster, reason: Reason, **fields: object) -> MillraceError:
    result = await made.generate(PROMPT, **fields)
    assert result.error is not None, result.responses
    error = from_rpc_error(result.error)
    assert error.reason is reason and result.error.code() is error.row.code, error
    await made.quiet()
    return error


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_incurable_failure_is_told_at_once(pair: Cluster, role: str) -> None:
    failing, other = (pair.prefills[0], pair.decodes[0])[:: 1 if role == "prefill" else -1]
    failing.script.append(fails("CONTEXT_TOO_LONG"))
    other.script.append(hangs())
    error = await told(pair, Reason.CONTEXT_TOO_LONG)
    assert error.message == "scripted CONTEXT_TOO_LONG" and not error.retry_after_s
    assert len(failing.submitted) == 1


async def test_attempts_are_bounded_and_the_client_may_retry(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), max_attempts=3)
    made.decodes[0].script.extend([fails("KV_EXPIRED")] * 5)
    error = await told(made, Reason.KV_EXPIRED)
    assert error.retry_after_s == 1 and "attempt 3 of 3" in error.message
    assert [request.id.attempt for request in made.decodes[0].submitted] == [0, 1, 2]


async def test_without_budget_the_first_error_is_told(cluster: Callable) -> None:
    made = await spare(cluster, resilience={"retries": {"ratio": 0.0, "per_s": 0.1}})
    made.decodes[0].script.extend([fails("KV_EXPIRED", after=2)] * 2)
    result = await made.generate(PROMPT)
    error = from_rpc_error(result.error)
    assert error.reason is Reason.KV_EXPIRED and error.retry_after_s == 1
    assert "too many requests are tried again" in error.message
    assert result.tokens() == expected(PROMPT, len(result.tokens())), "what it had was right"
    assert made.metric("millrace_retries_total", reason="KV_EXPIRED") == 1
    assert made.metric("millrace_retries_refused_total") == 1
    await made.quiet()


@pytest.mark.parametrize("layouts", [(), ("a", "b")], ids=["none", "that never pair"])
async def test_without_workers_a_request_is_told_so(cluster: Callable, layouts: Sequence[str]) -> None:
    workers = [FakeWorker(role, layout=layout) for role, layout in zip((PREFILL, DECODE), layouts, strict=False)]
    made = await cluster(*workers, wait=False, timeouts={"no_workers": 0.1})
    await made.until(lambda: all(worker.link for worker in made.router.registry.workers.values()))
    assert (await told(made, Reason.NO_WORKERS)).retry_after_s == 1
    assert not made.router.registry.ready


async def test_workers_that_come_while_a_request_waits_serve_it(cluster: Callable) -> None:
    """As by a request that came after them: a burst during a start is not refused because it is a burst."""
    prefill, decode = FakeWorker(PREFILL), FakeWorker(DECODE, capacity=0)
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
    decode.change(capacity=8)
    assert (await waiting).tokens() == expected(PROMPT, 8)


@pytest.mark.parametrize("stage", ["queue", "prefill", "handover", "decode"])
async def test_a_deadline_ends_a_request_in_every_stage(cluster: Callable, stage: str) -> None:
    """Where it ended counts, with the time until then."""
    made = await cluster(FakeWorker(PREFILL, capacity=0 if stage == "queue" else 8), FakeWorker(DECODE))
    made.prefills[0].script.append(hangs() if stage == "prefill" else normal)
    decodes = asyncio.Event()  # once the prefill worker's end is known: its last message may come later than a token
    made.decodes[0].script.append(says(decodes, (0, 2), asyncio.Event()))
    asked = asyncio.create_task(made.generate(PROMPT, timeout=600))
    for now in ("handover", "decode") if stage == "decode" else ("queued" if stage == "queue" else stage,):
        await made.until(lambda now=now: [flow.stage for flow in flows(made)] == [now])
        if stage == "decode":
            decodes.set()
    [stream] = made.router.inference.active
    [generation] = [continuation.generation for continuation in stream.continuations]
    generation.flow.deadline = asyncio.get_running_loop().time()
    generation._tick()
    assert (await asked).error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await made.quiet()
    reached = {"queue": 0, "prefill": 1, "handover": 2, "decode": 3}[stage]
    assert in_stages(made) == {
        "route",
        "queue",
        "first_token",
        "total",
        *("prefill", "kv_transfer", "decode")[:reached],
    }
    last = "kv_transfer" if stage == "handover" else stage
    assert made.metric("millrace_stage_seconds_sum", stage=last) > 0


@pytest.mark.parametrize("after", [0, 2])
async def test_a_cancellation_reaches_both_subs(pair: Cluster, after: int) -> None:
    pair.prefills[0].script.append(hangs())
    pair.decodes[0].script.append(hangs(after))
    call = pair.stub.Generate(request_of(PROMPT))
    await pair.until(lambda: pair.prefills[0].active and pair.decodes[0].active)
    if after:
        await call.read()
    call.cancel()
    await pair.quiet()
    for worker in pair.workers:
        assert worker.aborted == [(worker.submitted[0].id.room, 0)]
    assert pair.metric("millrace_requests_total", api="grpc", status="cancelled") == 1
    assert (await pair.generate(PROMPT)).error is None  # behind the workers' word that they have aborted
    assert pair.metric("millrace_stale_messages_total", kind="output") == 0


async def test_a_wait_without_room_ends_with_the_time_of_the_queue(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL, capacity=0), FakeWorker(DECODE), timeouts={"queue": 0.1})
    rate = made.router.admission._rate
    rate._tokens, rate._seconds, rate._longest = 1.0, 10.0, 9.0  # as if a prompt token were served in ten seconds
    assert 30 <= (await told(made, Reason.OVERLOADED)).retry_after_s < 40


async def test_a_higher_priority_goes_first(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL, capacity=0), FakeWorker(DECODE))
    tasks = []
    for priority in (0, 5, -5, 5):
        name = f"p{priority}.{len(tasks)}"
        tasks.append(asyncio.create_task(made.generate(PROMPT, priority=priority, request_id=name)))
        await made.until(lambda: len(made.router.admission) == len(tasks))
    made.prefills[0].change(capacity=8)
    await asyncio.gather(*tasks)
    assert [request.request_id for request in made.prefills[0].submitted] == ["p5.1", "p5.3", "p0.0", "p-5.2"]


# ------------------------------------------------------------------------------------- workers that fail in a row


async def test_a_worker_that_fails_in_a_row_is_left_out_and_explained(cluster: Callable) -> None:
    made = await spare(cluster, resilience={"outliers": {"consecutive": 3, "pause": 60}})
    bad, good = made.decodes
    bad.script, good.script = type(bad.script)([fails("STALLED")] * 50), type(bad.script)()
    for i in range(12):
        result = await made.generate(PROMPT, request_id=f"r{i}")
        assert result.tokens() == expected(PROMPT, 8)
        await made.settled()
    assert len(bad.submitted) == 3, "three failures in a row, and no request more"
    assert made.metric("millrace_ejections_total", role="decode", why="consecutive") == 1
    decision = made.router.registry.placer.decisions_of("r11")[-1]
    excluded = [row.excluded for step in decision.explain() for row in step.candidates if row.excluded]
    assert excluded == ["ejected: failures in a row"]
    await made.quiet()
    await bad.restart()
    await made.until(lambda: all(status.routable for status in made.router.registry.status()))
    bad.script.clear()
    while len(bad.submitted) < 4:  # another process begins anew
        assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)
