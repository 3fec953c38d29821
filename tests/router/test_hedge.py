"""A second attempt elsewhere when the first token is late: one stream for the client, whoever wins."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.v1 import worker_pb2
from millrace_common.reasons import Reason
from millrace_router.config import Timeouts
from millrace_router.flow.flow import Flow, Leg
from millrace_router.flow.hedged import Hedged
from millrace_router.resilience.hedge import Hedge
from millrace_rpc.errors import MillraceError, from_rpc_error
from router.fake_worker import DECODE, PREFILL, FakeWorker, expected, fails, failure, hangs, normal
from router.harness import Cluster
from router.test_flow import BOTH, out

PROMPT = [10, 20, 30]
SOON = {"hedge_after": 0.1}


def flow() -> Flow:
    made = Flow(Timeouts(), 4, 2, None, progress=0.0, queue_s=60.0)
    made.assign(BOTH, 0.0)
    return made


@given(st.randoms(use_true_random=False))
def test_the_first_word_decides_once_and_for_all(choices: random.Random) -> None:
    hedge, spoke = Hedge([flow(), flow()]), []
    failed = MillraceError(Reason.INTERNAL, "x")
    for _ in range(8):
        i = choices.randrange(2)
        if choices.random() < 0.3:
            hedge.flows[i].cancel(failed)
        elif not hedge.flows[i].ended:
            hedge.flows[i].output(Leg.PREFILL, out(0, 5), 0.0)
            spoke.append(i)
        decided = hedge.winner
        assert hedge.look() == (decided is None and hedge.winner is not None)
        assert hedge.leader == (spoke[0] if spoke else hedge.leader)
        if spoke:
            assert hedge.winner == spoke[0]
        elif all(one.ended for one in hedge.flows):
            assert hedge.winner == 0
        else:
            assert hedge.winner is None and not hedge.flows[hedge.leader].ended


async def two(cluster: Callable, **resilience: object) -> Cluster:
    roles = (PREFILL, PREFILL, DECODE, DECODE)
    made = await cluster(*(FakeWorker(role) for role in roles), resilience=resilience or SOON)
    for workers in (made.prefills, made.decodes):
        workers[1].script = workers[0].script
    return made


async def test_a_late_first_token_comes_from_elsewhere(cluster: Callable) -> None:
    made = await two(cluster)
    made.prefills[0].script.append(hangs())
    made.decodes[0].script.append(hangs())
    result = await made.generate(PROMPT, sampling={"seed": 7})
    assert result.tokens() == expected(PROMPT, 8, 7)
    await made.quiet()
    assert made.metric("millrace_hedges_total", outcome="won") == 1
    late = [worker.submitted[0].id.room for worker in made.workers if worker.aborted]
    assert len(late) == 2 and len(set(late)) == 1, "the workers of the loser were told to stop, and no others"
    assert [len(worker.submitted) for worker in made.workers] == [1, 1, 1, 1], "each worker had one of the two"


async def test_a_client_that_leaves_stops_both(cluster: Callable) -> None:
    made = await two(cluster)
    made.prefills[0].script.extend([hangs(), hangs()])
    made.decodes[0].script.extend([hangs(), hangs()])
    task = asyncio.create_task(made.generate(PROMPT))
    await made.until(lambda: all(worker.active for worker in made.workers))
    task.cancel()
    await made.quiet()
    assert all(worker.aborted for worker in made.workers)


async def test_nothing_is_hedged_before_its_time_or_without_the_setting(cluster: Callable) -> None:
    made = await two(cluster, hedge_after=30.0)
    assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)
    assert sum(len(worker.submitted) for worker in made.workers) == 2
    await made.quiet()


async def test_no_other_worker_no_hedge(cluster: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for one either: in the queue it would delay others and make the wait look long."""
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), resilience=SOON)
    tried = asyncio.Event()
    late = Hedged._late
    monkeypatch.setattr(Hedged, "_late", lambda self: (late(self), tried.set()))
    for worker in made.workers:
        worker.script.append(hangs())
    first = asyncio.create_task(made.generate(PROMPT, sampling={"max_tokens": 2}))
    await asyncio.wait_for(tried.wait(), 5)
    assert len(made.router.admission) == 0
    assert (await made.generate([1], timeout=5)).error is None
    first.cancel()
    await made.quiet()
    assert [len(worker.submitted) for worker in made.workers] == [2, 2]
    assert made.metric("millrace_hedges_total", outcome="lost") == 0


async def test_the_budget_is_shared(cluster: Callable) -> None:
    made = await two(cluster, hedge_after=0.1, retries={"ratio": 0, "per_s": 0})
    made.prefills[0].script.append(hangs())
    made.decodes[0].script.append(hangs())
    result = await made.generate(PROMPT, timeout=0.6)
    assert result.error is not None
    assert made.metric("millrace_hedges_total", outcome="refused") == 1
    await made.quiet()


async def test_one_that_fails_leaves_it_to_the_other(cluster: Callable) -> None:
    """The second fails for good; the first, which only was late, is what the client gets."""
    made = await two(cluster)
    go = asyncio.Event()

    async def late(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator:
        await go.wait()
        async for word in normal(worker, request):
            yield word

    made.prefills[0].script.extend([late, fails("CONTEXT_TOO_LONG")])
    made.decodes[0].script.extend([late, hangs()])
    task = asyncio.create_task(made.generate(PROMPT))
    await made.until(lambda: any(worker.aborted for worker in made.decodes))
    go.set()
    assert (await task).tokens() == expected(PROMPT, 8)
    await made.quiet()
    assert made.metric("millrace_hedges_total", outcome="lost") == 1


async def test_when_both_fail_the_client_gets_the_error(cluster: Callable) -> None:
    made = await two(cluster)
    go = asyncio.Event()

    async def late(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator:
        await go.wait()
        yield failure(request, "CONTEXT_TOO_LONG")

    made.prefills[0].script.extend([late, fails("INTERNAL")])
    made.decodes[0].script.extend([hangs(), hangs()])
    task = asyncio.create_task(made.generate(PROMPT))
    await made.until(lambda: any(worker.aborted for worker in made.decodes))
    go.set()
    assert from_rpc_error((await task).error).reason is Reason.CONTEXT_TOO_LONG
    await made.quiet()
