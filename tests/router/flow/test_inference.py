"""Between a request's arrival and its place in the queue."""

import asyncio
import time
from collections.abc import Callable
from unittest.mock import Mock

import grpc
import pytest
from millrace_common.reasons import Reason
from millrace_router.flow.ask import Ask
from millrace_router.flow.generation import Generation
from millrace_router.flow.inference import Answer, Inference
from millrace_router.flow.stream import AnswerText
from millrace_router.queue.admission import Admission
from millrace_router.queue.tenant import Bucket, Caller, Tenant, caller
from millrace_rpc.errors import MillraceError
from router.fake_worker import DECODE, PREFILL, FakeWorker, expected, fails
from router.harness import Cluster

PROMPT = [10, 20, 30]


async def test_a_client_that_leaves_while_its_prompt_is_read_is_counted(pair: Cluster) -> None:
    reading = asyncio.Event()

    async def tokenize(prompt: object, model: object, large: bool, most: float) -> list[int]:
        reading.set()
        await asyncio.Event().wait()

    pair.router.inference.tokenize = tokenize
    task = asyncio.create_task(pair.generate(PROMPT))
    await reading.wait()
    task.cancel()
    await pair.until(lambda: pair.metric("millrace_requests_total", api="grpc", status="cancelled") == 1)


PLACES = [(Inference, "tokenize"), (Admission, "enter"), (AnswerText, "push")]


@pytest.mark.parametrize("place", PLACES, ids=["prompt", "queue", "answer"])
async def test_our_fault_is_counted(pair: Cluster, monkeypatch: pytest.MonkeyPatch, place: tuple[type, str]) -> None:
    monkeypatch.setattr(*place, Mock(side_effect=RecursionError))
    assert (await pair.generate(PROMPT)).error.code() is grpc.StatusCode.INTERNAL
    assert pair.metric("millrace_requests_total", api="grpc", status="internal") == 1
    await pair.quiet()


async def test_our_fault_at_a_time_limit_is_an_end(cluster: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generation, "_due_since", Mock(side_effect=KeyError))
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE, capacity=0), timeouts={"queue": 0.01})
    assert (await made.generate(PROMPT)).error.code() is grpc.StatusCode.INTERNAL


async def test_who_is_over_its_rate_takes_nobodys_place(cluster: Callable) -> None:
    """Also when it found out only after its prompt was read."""
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE, capacity=0), queue_size=1)
    waiting = asyncio.create_task(made.generate(PROMPT))
    await made.until(lambda: len(made.router.admission) == 1)
    greedy = Tenant("greedy", weight=4.0, requests=Bucket(1, 1, time.monotonic()))
    caller.set(Caller(greedy))

    async def tokenize(prompt: object, model: object, large: bool, most: float) -> list[int]:
        greedy.begin(1, time.monotonic())  # another request of it, in the meantime
        return PROMPT

    made.router.inference.tokenize = tokenize
    with pytest.raises(MillraceError) as caught:
        await made.router.inference.generate(Ask(model="", prompt=PROMPT), "grpc")
    assert caught.value.reason is Reason.RATE_LIMITED
    assert len(made.router.admission) == 1
    waiting.cancel()
    await made.quiet()


async def test_a_client_may_be_behind_by_as_many_steps_with_more_choices(cluster: Callable) -> None:
    """A step of the engine brings a token of each."""
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), limits={"unread": 64})
    ask = Ask(model="", prompt=PROMPT, numbers={"max_tokens": 30, "seed": 0}, n=4)
    stream = (await made.router.inference.generate(ask, "grpc")).stream
    await made.until(lambda: all(one.generation.flow.ended for one in stream.continuations))
    tokens: dict[int, list[int]] = {i: [] for i in range(4)}
    async for delta in stream.deltas():
        tokens[delta.index] += delta.token_ids
    assert tokens == {i: expected(PROMPT, 30, i) for i in range(4)}
    await made.quiet()


async def test_each_continuation_takes_one_place_when_the_request_arrives(cluster: Callable) -> None:
    """Reading a long prompt costs no place."""
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE))
    inference, read = made.router.inference, asyncio.Event()

    async def tokenize(prompt: object, model: object, large: bool, most: float) -> list[int]:
        await read.wait()
        return PROMPT

    inference.tokenize = tokenize
    ask = Ask(model="", prompt=PROMPT, numbers={"max_tokens": 2}, n=2)
    first = asyncio.create_task(inference.generate(ask, "grpc"))
    second = asyncio.create_task(inference.generate(ask, "grpc"))
    await asyncio.sleep(0)
    read.set()
    answers = await asyncio.gather(first, second)
    arrivals = [[one.generation.job.place.arrival for one in answer.stream.continuations] for answer in answers]
    start = arrivals[0][0]
    assert arrivals == [[start, start + 1], [start + 2, start + 3]]
    for answer in answers:
        async for _ in answer.stream.deltas():
            pass
    await made.quiet()


# ------------------------------------------------------------------------------------------------ what a tenant pays

BURST = 1000.0


def payer() -> Tenant:
    """Its buckets do not fill by themselves within a test."""
    now = time.monotonic()
    tenant = Tenant("payer", requests=Bucket(1e-6, BURST, now), tokens=Bucket(1e-6, BURST, now))
    tenant.check(now)  # a new bucket is full
    caller.set(Caller(tenant))
    return tenant


def paid(tenant: Tenant) -> tuple[float, float]:
    """Requests and tokens."""
    assert tenant.requests is not None and tenant.tokens is not None
    return round(BURST - tenant.requests.level, 3), round(BURST - tenant.tokens.level, 3)


def spent(made: Cluster) -> float:
    """By all tenants, in the fair queue's account."""
    level = made.router.admission._queue._levels[0]
    return sum(tenant.spent for tenant in level.tenants.values())


async def ask(made: Cluster, **fields: object) -> Answer:
    numbers = {"max_tokens": 4, "seed": 0}
    return await made.router.inference.generate(Ask(model="", prompt=PROMPT, numbers=numbers, **fields), "grpc")


async def outcome(answer: Answer) -> Reason | None:
    try:
        async for _ in answer.stream.deltas():
            pass
    except MillraceError as error:
        return error.reason
    return None


async def leave(answer: Answer) -> None:
    answer.stream.cancel(MillraceError(Reason.CANCELLED, "the client left"))
    assert await outcome(answer) is Reason.CANCELLED


@pytest.mark.parametrize("end", ["cancelled", "deadline", "queue timeout", "pushed out"])
async def test_a_request_that_leaves_the_queue_unserved_costs_nothing(cluster: Callable, end: str) -> None:
    patience = {"timeouts": {"queue": 0.2}} if end == "queue timeout" else {}
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE, capacity=0), queue_size=2, **patience)
    tenant = payer()
    answer = await ask(made, n=2, timeout_s=0.2 if end == "deadline" else None)
    assert len(made.router.admission) == 2 and paid(tenant) == (1, 2 * len(PROMPT))
    if end == "cancelled":
        answer.stream.cancel(MillraceError(Reason.CANCELLED, "the client left"))
    elif end == "pushed out":
        caller.set(Caller(Tenant("other", weight=100.0)))
        await leave(await ask(made))
        answer.stream.cancel(MillraceError(Reason.CANCELLED, "the client left"))  # its other continuation
    await outcome(answer)
    await made.quiet()
    assert paid(tenant) == (0, 0) and spent(made) == 0


async def test_a_request_that_no_worker_can_ever_serve_costs_nothing(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE, capacity=0))
    tenant = payer()
    answer = await ask(made)
    made.router.registry.choose = Mock(side_effect=MillraceError(Reason.NO_WORKERS, "none is left"))
    made.router.admission.pump()
    assert await outcome(answer) is Reason.NO_WORKERS
    assert paid(tenant) == (0, 0)


async def test_a_request_that_is_refused_before_it_waits_costs_nothing(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE, capacity=0), queue_size=1)
    waiting = await ask(made)
    tenant = payer()
    for fields, reason in (({}, Reason.QUEUE_FULL), ({"timeout_s": 1e-9}, Reason.DEADLINE_EXCEEDED)):
        with pytest.raises(MillraceError) as caught:
            await ask(made, **fields)
        assert caught.value.reason in (reason, Reason.QUEUE_FULL)
    assert paid(tenant) == (0, 0)
    await leave(waiting)
    await made.quiet()


async def test_another_attempt_is_not_paid_for_again(pair: Cluster) -> None:
    tenant = payer()
    pair.decodes[0].script.append(fails("KV_EXPIRED", after=2))
    assert await outcome(await ask(pair)) is None
    await pair.quiet()
    assert len(pair.prefills[0].submitted) == 2
    assert paid(tenant) == (1, len(PROMPT) + 4) and spent(pair) == len(PROMPT) + 4


async def test_only_the_continuations_that_were_served_are_paid_for(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE))
    tenant = payer()
    tried = []
    choose = made.router.registry.choose
    made.router.registry.choose = lambda want: None if tried else tried.append(want) or choose(want)
    answer = await ask(made, n=2)
    served, waiting = (continuation.generation.flow for continuation in answer.stream.continuations)
    await made.until(lambda: served.ended)
    assert served.tries == 1 and waiting.attempt == -1
    await leave(answer)
    await made.quiet()
    assert paid(tenant) == (1, len(PROMPT) + 4)


async def test_attempts_that_workers_refuse_cost_nothing(cluster: Callable) -> None:
    for worker in (busy := (FakeWorker(PREFILL), FakeWorker(DECODE))):
        worker.script.extend([fails("OVERLOADED")] * 100)
    made, tenant = await cluster(*busy), payer()
    answer = await ask(made)
    (flow,) = (continuation.generation.flow for continuation in answer.stream.continuations)
    await made.until(lambda: flow.refusals and not flow.tries)
    made.router.registry.choose = lambda want: None
    caller.set(Caller(Tenant("other")))
    waiting = await ask(made)  # so the account of the first tenant is kept
    await leave(answer)
    await made.until(lambda: len(made.router.inference.active) == 1)
    assert paid(tenant) == (0, 0) and spent(made) == 0
    await leave(waiting)
