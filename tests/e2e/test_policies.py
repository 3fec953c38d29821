"""Routing by prefix caches with real workers: what they say is true, and short prompts need no prefill worker."""

import asyncio
import itertools
from collections.abc import Callable

from millrace.v1 import admin_pb2, worker_pb2
from millrace_cli.cluster import ClusterSpec
from millrace_testing.client import Client
from millrace_testing.inside_cluster import InsideCluster
from millrace_testing.sim import expected, prompt_of

PREFILL, DECODE = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE


def spec(*router_set: str, prefill: int = 2) -> ClusterSpec:
    return ClusterSpec(
        prefill=prefill,
        decode=1,
        engine="sim",
        worker_set=("limits.checks=[canary]",),
        router_set=router_set,
    )


async def ask_and_settle(client: Client, name: str, prompt: list[int]) -> list[int]:
    """The next request meets an idle decode worker, and the router knows that it is."""
    before = await decoded(client)
    tokens = (await client.generate(prompt, name=name, max_tokens=8, ignore_eos=True)).tokens
    while await decoded(client) < before + len(tokens) - 1:  # perhaps without the first
        await asyncio.sleep(0.01)
    await client.wait_whole()
    return tokens


async def ask_and_report(client: Client, name: str, prompt: list[int], max_tokens: int = 8) -> list[int]:
    """The next request meets idle prefill workers, and the router knows that they are."""
    before = await prompts_computed(client, PREFILL)
    tokens = (await client.generate(prompt, name=name, max_tokens=max_tokens, ignore_eos=True)).tokens
    await reported(client, before + len(prompt))
    return tokens


async def reported(client: Client, prompt_tokens: int) -> int:
    """What prefill workers were given, once they report at least so many tokens."""
    while (found := await prompts_computed(client, PREFILL)) < prompt_tokens:
        await asyncio.sleep(0.01)
    return found


async def decoded(client: Client) -> int:
    """Tokens that decode workers have reported."""
    workers = (await client.admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers
    return sum(worker.load.replicas[0].counters["output_tokens"] for worker in workers if worker.info.role == DECODE)


async def prompts_computed(client: Client, role: int) -> int:
    """Prompt tokens that the workers of a role were given."""
    workers = await client.wait_whole()
    return sum(worker.load.replicas[0].counters["prompt_tokens"] for worker in workers if worker.info.role == role)


async def _until_measured(client: Client) -> None:
    """Ask until a replica knows how long its steps with prompts take."""
    for length in itertools.count(100, 50):
        if any(worker.load.replicas[0].step_times.token_s for worker in await client.wait_whole()):
            return
        await ask_and_settle(client, f"measure {length}", prompt_of(length))


async def test_an_idle_decode_worker_runs_prompts_with_the_same_tokens() -> None:
    lengths = (1, 63, 64, 65, 127, 128, 300)
    prompts = [prompt_of(length) for length in lengths]
    local = spec("routing.slo.ttft=5", prefill=1)
    async with InsideCluster(local) as cluster, Client(cluster.grpc_address, cluster.admin_address) as client:
        await _until_measured(client)
        before = await prompts_computed(client, PREFILL)
        answers = [await ask_and_settle(client, f"r{len(prompt)}", prompt) for prompt in prompts]
        assert answers == [expected(prompt, 8) for prompt in prompts]
        found = [await client.placement(f"r{length}") for length in lengths]
        assert [entry.route for entry in found] == ["local"] * 7
        assert await prompts_computed(client, PREFILL) == before
        longer = [*prompts[-1], *answers[-1], 77]  # a second turn: all but its end is cached where it was decoded
        assert await ask_and_settle(client, "turn 2", longer) == expected(longer, 8)
        second = await client.placement("turn 2")
        assert (second.route, second.cached_tokens) == ("local", 256)
        await client.wait_whole()


async def test_prefix_is_computed_where_it_is_cached() -> None:
    """With two prefill workers, every prompt of a family goes to one that has computed all of it; after a flush nobody
    has anything.
    """
    kv_aware = spec("prefill_policy=kv_aware", "decode_policy=round_robin")
    async with InsideCluster(kv_aware) as cluster, Client(cluster.grpc_address, cluster.admin_address) as client:
        family = prompt_of(640)
        assert await ask_and_report(client, "first", family) == expected(family, 8)
        home = chosen((await client.placement("first")).selections[0])
        await _until_known(client, family, lambda known: known[home] == 640)
        for name in ("second", "third"):
            prompt = [*family, *prompt_of(70)]
            assert await ask_and_report(client, name, prompt) == expected(prompt, 8)
            found = await client.placement(name)
            assert found.cached_tokens == 640
            known = {row.address: row.cached_tokens for row in found.selections[0].candidates}
            assert known[home] == known[chosen(found.selections[0])] == 640  # a look may have gone to the other one
        await client.wait_whole()
        await _until_known(client, family, lambda known: not any(known.values()), flush=True)


def chosen(selection: admin_pb2.Selection) -> str:
    (address,) = [row.address for row in selection.candidates if row.chosen]
    return address


async def _until_known(
    client: Client, family: list[int], condition: Callable[[dict[str, int]], bool], flush: bool = False
) -> None:
    """Ask for one token after the family until the router knows what it should of the prefill workers."""
    for number in itertools.count():
        if flush:
            await client.wait_whole()
            await client.admin.FlushCaches(admin_pb2.FlushCachesRequest())
        name = f"look {flush} {number}"
        await ask_and_report(client, name, [*family, 7], max_tokens=1)
        rows = (await client.placement(name)).selections[0].candidates
        if condition({row.address: row.cached_tokens for row in rows}):
            return
        await asyncio.sleep(0.05)
