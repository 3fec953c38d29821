"""Conversations whose answers come back to the prefill worker from the decode worker, with real processes."""

import asyncio

import grpc
import pytest
from millrace.v1 import worker_pb2, worker_pb2_grpc
from millrace_cli.cluster import ClusterSpec, LocalCluster
from millrace_rpc.client import channel
from millrace_testing.client import Client
from millrace_testing.cluster import with_workers
from millrace_testing.procs import PYTHONPATH
from millrace_testing.samples import total
from millrace_testing.sim import expected, prompt_of

PAGE = 64
DECODE = worker_pb2.ROLE_DECODE
# 1 ms per prompt token: an answer of 200 tokens takes longer to compute than a fetch can ever be expected to take
COSTS = ("limits.checks=[canary]", "sim.token_s=0.001")
KV_AWARE = ("prefill_policy=kv_aware", "decode_policy=kv_aware")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the processes."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)


async def cached_blocks(address: str) -> set[bytes]:
    """Of all replicas of a worker."""
    async with channel(address) as ch:
        call = worker_pb2_grpc.WorkerServiceStub(ch).WatchCache(worker_pb2.WatchCacheRequest())
        message = await call.read()
        assert message is not grpc.aio.EOF and len(message.changes) == 1 and message.changes[0].snapshot
        call.cancel()
        return set(message.changes[0].stored)


async def until_known(client: Client, cluster: LocalCluster, at_decode: int) -> None:
    """Until the decode workers have so many pages in their caches, and the router knows all of them."""
    while True:
        workers = await client.wait_whole()
        blocks = {worker.address: await cached_blocks(worker.address) for worker in workers}
        there = sum(len(blocks[worker.address]) for worker in workers if worker.info.role == DECODE)
        known = await total(cluster.http_url, "millrace_cache_blocks")
        if there >= at_decode and known == len(set().union(*blocks.values())):
            return
        await asyncio.sleep(0.02)


@pytest.mark.long
async def test_conversation_is_computed_once() -> None:
    """Ten turns: whatever was said before comes from a cache, and every token is that of the oracle."""
    spec = ClusterSpec(engine="sim", worker_set=COSTS, router_set=KV_AWARE, command=with_workers("patient_worker"))
    async with LocalCluster(spec) as cluster, Client(cluster.grpc_address, cluster.admin_address) as client:
        workers = await client.wait_whole()
        (decode,) = [worker.address for worker in workers if worker.info.role == DECODE]
        before = len(await cached_blocks(decode))
        history: list[int] = []
        for turn in range(10):
            prompt = [*history, *prompt_of(400)]
            answer = await client.generate(prompt, name=f"turn {turn}", max_tokens=200, ignore_eos=True)
            assert answer.tokens == expected(prompt, 200)
            if turn:
                prefix_fetch = (await client.placement(f"turn {turn}")).prefix_fetch
                assert (
                    prefix_fetch.taken
                    and prefix_fetch.address == decode
                    and prefix_fetch.fetch_seconds < prefix_fetch.compute_seconds
                ), prefix_fetch
                assert answer.usage.cached_prompt_tokens >= 0.95 * len(history)
            history = [*prompt, *answer.tokens]
            await until_known(client, cluster, before + (len(history) - 1) // PAGE)
        await client.wait_whole()
