"""A worker that pauses, gets other weights, sleeps and wakes, as routers and trainers see it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from millrace.v1 import common_pb2, worker_pb2
from millrace_common.pace import LEAST_S
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError, from_rpc_error
from millrace_testing.fake_router import FakeLink, FakePair, request
from millrace_testing.paths import TINY
from millrace_testing.procs import SIM, Worker, gone, workers
from millrace_testing.sim import expected, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW = (*SIM, "sim={step_s: 0.01}")
MODEL = (f"model={TINY}", "limits={num_pages: 129, max_model_len: 512, max_prefill_tokens: 128}", "dtype=float32")
PROMPTS = [[10 + (7 * i + n) % 500 for i in range(n)] for n in (3, 64, 200)]
ERROR = common_pb2.FINISH_REASON_ERROR


async def do(worker: Worker, action: str, **fields: Any) -> str:
    """The version of the weights afterwards. Raises MillraceError."""
    order = worker_pb2.SetWeightsRequest(action=f"WEIGHTS_ACTION_{action.upper()}", **fields)
    try:
        return (await worker.stub.SetWeights(order, timeout=60)).version
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


async def linked(worker: Worker) -> FakeLink:
    return FakeLink(worker, epoch=(await worker.info()).epoch)


async def answers(worker: Worker, cached: int | None = None) -> list[list[int]]:
    """Greedy tokens. `cached`: tokens of the longest prompt that must come from the prefix cache."""
    async with await linked(worker) as link:
        batch = [request(prompt, max_tokens=12) for prompt in PROMPTS]
        for one in batch:
            link.submit(one)
        for one in batch:
            await link.finish(one, timeout_s=60)
        if cached is not None:
            assert link.of(batch[-1])[0].cached_tokens == cached
        return [link.tokens(one) for one in batch]


# ------------------------------------------------------------------------------------- pauses, without a model


async def test_a_pause_keeps_sequences_and_a_resume_goes_on_with_them(tmp_path: Path) -> None:
    """Longer than any silence that is taken for a hang."""
    async with workers(tmp_path, "unified", sets=(*SLOW, "dp=2")) as [worker], FakeLink(worker) as link:
        ours = [request(prompt_of(100), max_tokens=200) for _ in range(4)]
        for number, one in enumerate(ours):
            one.replica = number % 2
            link.submit(one)
        await asyncio.gather(*(link.first(one) for one in ours))
        await do(worker, "pause")
        before, steps = [len(link.tokens(one)) for one in ours], [r.steps for r in (await worker.load()).replicas]
        late = request(prompt_of(10))
        link.submit(late)
        assert (await link.finish(late)).failure.reason == Reason.NOT_READY
        link.abort(ours[0])
        await link.finish(ours[0])  # messages are handled
        await asyncio.sleep(LEAST_S + 1)
        load = await worker.load()
        assert load.state == worker_pb2.WORKER_STATE_PAUSED and all(r.paused for r in load.replicas)
        assert [r.steps for r in load.replicas] == steps
        assert [len(link.tokens(one)) for one in ours] == before and max(before) < 200
        await do(worker, "pause")  # again: nothing happens
        await do(worker, "resume")
        for one in ours[1:]:
            await link.finish(one)
            assert link.tokens(one) == expected(list(one.token_ids), 200)
        await worker.whole()


async def test_a_pause_that_drops_ends_sequences_with_an_error_that_routers_retry(tmp_path: Path) -> None:
    async with workers(tmp_path, "unified", sets=SLOW) as [worker], FakeLink(worker) as link:
        one = request(prompt_of(100), max_tokens=500)
        link.submit(one)
        await link.first(one)
        await do(worker, "pause", drop=True)
        end = await link.finish(one)
        assert (end.finish_reason, end.failure.reason) == (ERROR, Reason.NOT_READY) and "paused" in end.failure.message
        await worker.whole()
        await do(worker, "resume")
        again = request(prompt_of(100))
        link.submit(again)  # the link has stayed
        await link.finish(again)


async def test_a_paused_worker_drains_at_once(tmp_path: Path) -> None:
    async with workers(tmp_path, "unified", sets=SLOW) as [worker], FakeLink(worker) as link:
        one = request(prompt_of(100), max_tokens=500)
        link.submit(one)
        await link.first(one)
        await do(worker, "pause")
        assert (await worker.stub.Drain(worker_pb2.DrainRequest(timeout_s=60), timeout=10)).aborted == 1
        assert (await link.finish(one)).failure.reason == Reason.DRAINING


async def test_actions_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    async with workers(tmp_path, "unified", sets=SIM) as [worker]:
        version = (await worker.info()).weights_version
        assert version and await worker.metric("millrace_worker_weights_info", version=version) == 1
        for action, fields in (("load", {"path": "/x"}), ("sleep", {}), ("wake", {})):
            with pytest.raises(MillraceError, match="pause it first") as caught:
                await do(worker, action, **fields)
            assert caught.value.reason is Reason.NOT_READY
        assert await do(worker, "resume") == version  # it serves already
        await do(worker, "pause")
        for fields, why in (
            ({}, "path must name"),
            ({"path": "/x"}, "a simulated engine has no weights"),
            ({"path": "/x", "version": "v" * 129}, "version has 129 characters; at most 128"),
        ):
            with pytest.raises(MillraceError, match=why) as caught:
                await do(worker, "load", **fields)
            assert caught.value.reason is Reason.INVALID_ARGUMENT
        with pytest.raises(MillraceError, match="action must be"):
            await do(worker, "unspecified")
        assert await do(worker, "resume") == version


async def test_sleep_ends_the_ranks_and_wake_starts_them_again(tmp_path: Path) -> None:
    async with workers(tmp_path, "prefill", "decode", sets=SIM) as (prefill, decode):
        both, ranks, epoch = (prefill, decode), [*prefill.ranks(), *decode.ranks()], decode.epoch
        prompt = prompt_of(300)
        async with FakePair(prefill, decode) as pair:
            one = pair.submit(request(prompt))
            await pair.to_decode.finish(one)
            await asyncio.gather(*(do(worker, "pause") for worker in both))
            await asyncio.gather(*(do(worker, "sleep") for worker in both))
            assert "sleep" in str(await pair.to_decode.end())
        await gone(ranks)
        assert (await decode.info()).state_message == "asleep" and not decode.ranks()
        for action, fields in (("resume", {}), ("load", {"path": "/x"})):
            with pytest.raises(MillraceError, match="wake it first"):
                await do(decode, action, **fields)
        await do(decode, "sleep")
        await asyncio.gather(*(do(worker, "wake") for worker in both))
        await asyncio.gather(*(do(worker, "resume") for worker in both))
        assert (await decode.info()).epoch != epoch
        source = await prefill.source()
        async with await linked(prefill) as to_prefill, await linked(decode) as to_decode:
            one = request(prompt)
            to_decode.submit(one, source)
            to_prefill.submit(one)
            await to_decode.finish(one)
            assert to_decode.tokens(one) == expected(prompt, 8) and to_prefill.of(one)[0].cached_tokens == 0
        assert await decode.metric("millrace_engine_total", what="output_tokens") > 8
        await decode.whole()


async def test_a_worker_that_sleeps_stops_in_good_order(tmp_path: Path) -> None:
    async with workers(tmp_path, "unified", sets=SIM) as [worker]:
        await do(worker, "pause")
        await do(worker, "sleep")
        await worker.close()
        assert worker.process.returncode == 0
