"""Hundreds of requests of random lengths through a router, a prefill and a decode worker; some clients hang up."""

import asyncio
import os
import random

import psutil
import pytest
from millrace_cli.cluster import ClusterSpec
from millrace_testing.client import Answer, Client, collect
from millrace_testing.cluster import SMALL, ControlledCluster
from millrace_testing.reference import greedy

REQUESTS = int(os.environ.get("MILLRACE_SOAK", 160))
WARM_UP = REQUESTS // 2
PROMPTS = 50
MAX_TOKENS = 24
CONCURRENCY = 16
GROWTH = 0.10  # of a process's memory after the warm-up

pytestmark = [pytest.mark.long]


def memory_of(cluster: ControlledCluster) -> dict[str, int]:
    """Bytes of each process tree."""
    sizes = {}
    for name in cluster.roles:
        process = psutil.Process(cluster.pid(name))
        sizes[name] = sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))
    return sizes


async def test_requests_of_random_lengths_leave_no_memory_behind() -> None:
    rng = random.Random(11)
    prompts = [[rng.randrange(10, 1000) for _ in range(rng.randrange(1, 500))] for _ in range(PROMPTS)]
    expected = greedy(prompts, MAX_TOKENS)
    assert len({tuple(one.tokens) for one in expected}) == PROMPTS  # an answer to another prompt would be noticed
    rng = random.Random(12)
    wrong: list[str] = []
    hung_up = finished = 0

    async def one(client: Client) -> None:
        nonlocal hung_up, finished
        which, max_tokens = rng.randrange(PROMPTS), rng.randrange(1, MAX_TOKENS + 1)
        hang_up_after = rng.randrange(0, max_tokens) if rng.random() < 0.05 else None
        answer = Answer()
        call = client.stream(prompts[which], max_tokens=max_tokens, ignore_eos=True, logprobs=0)
        async for chunk in call:
            collect(answer, chunk)
            if hang_up_after is not None and hang_up_after < len(answer.tokens) < max_tokens:
                call.cancel()
                hung_up += 1
                break
        else:
            finished += 1
            if len(answer.tokens) != max_tokens:
                wrong.append(f"prompt {which}: {len(answer.tokens)} tokens instead of {max_tokens}")
        if not expected[which].begins_with(answer.tokens, answer.sampled):
            wrong.append(f"prompt {which}: {answer.tokens} {answer.sampled} instead of {expected[which]}")

    async def many(client: Client, count: int) -> None:
        left = iter(range(count))

        async def runner() -> None:
            for _ in left:
                await one(client)

        await asyncio.gather(*(runner() for _ in range(CONCURRENCY)))

    async with (
        ControlledCluster(ClusterSpec(worker_set=SMALL)) as cluster,
        Client(cluster.grpc_address, cluster.admin_address) as client,
    ):
        await many(client, WARM_UP)
        before = memory_of(cluster)
        await many(client, REQUESTS - WARM_UP)
        assert not wrong, wrong[:3]
        assert hung_up >= REQUESTS // 100
        assert finished + hung_up == REQUESTS
        await client.wait_whole()
        grown = {
            name: (before[name], now) for name, now in memory_of(cluster).items() if now > before[name] * (1 + GROWTH)
        }
        assert not grown, f"memory grew (bytes before, after): {grown}"
