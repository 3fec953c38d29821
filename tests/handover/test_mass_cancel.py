"""Many requests end at once while their KV is on its way, with the simulated engine."""

import asyncio
import random

import pytest
from millrace.v1 import worker_pb2
from millrace_testing.fake_router import FakePair, request
from millrace_testing.inside import inside
from millrace_testing.procs import SIM
from millrace_testing.sim import expected, prompt_of

CLIENTS, ROUNDS = 40, 2
LEAVE_S = 0.02  # within which clients leave: Fetch streams begin then
SLOW = (*SIM, "sim={token_s: 0.00001}", "limits.max_prefill_tokens=512", "limits.max_running=128")


async def test_half_of_many_requests_aborted_leaves_the_others_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Fetch streams of the aborted ones end while messages are sent on them. The connection and its transfers stay."""
    chance = random.Random(7)
    async with inside("prefill", "decode", sets=SLOW) as (prefill, decode):
        for _ in range(ROUNDS):
            async with FakePair(prefill, decode) as both:
                requests = [both.submit(request(prompt_of(100 + 20 * i), max_tokens=8)) for i in range(CLIENTS)]
                leaving = requests[::2]
                await asyncio.gather(*(leave(both, r, chance.uniform(0, LEAVE_S), chance) for r in leaving))
                await asyncio.gather(*(both.to_decode.finish(r) for r in requests))
                for r in requests[1::2]:
                    assert both.to_decode.tokens(r) == expected(list(r.token_ids), 8), both.to_decode.of(r)[-1].failure
        assert "dropped worker" not in caplog.text
        for worker in (prefill, decode):
            await worker.whole()  # leases of prompts that were aborted on one side only end by themselves


async def leave(both: FakePair, r: worker_pb2.EngineRequest, after_s: float, chance: random.Random) -> None:
    """As a router aborts, with its two messages arriving at different times."""
    await asyncio.sleep(after_s)
    both.to_prefill.abort(r)
    await asyncio.sleep(chance.uniform(0, LEAVE_S))
    both.to_decode.abort(r)
