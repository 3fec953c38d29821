"""More requests than the workers have room for: they wait in the router, and nothing healthy is blamed.

The simulated workers' pools hold two to three sequences, and the router's limits are far below the time that a queue of
requests takes, as they are with real models and the default limits.
"""

from __future__ import annotations

import asyncio
import random

import grpc
import httpx
import pytest
from millrace.v1 import admin_pb2, inference_pb2, worker_pb2
from millrace_cli.cluster import ClusterSpec
from millrace_rpc.errors import MillraceError, from_rpc_error
from millrace_testing.client import Answer, Client
from millrace_testing.cluster import ControlledCluster, MixedSpec
from millrace_testing.sim import expected
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(170)]

PROMPT, OUTPUT = 300, 1200
_MODELS = inference_pb2.ListModelsRequest()
LIMITS = ("timeouts.prefill=2", "timeouts.handover=1.5", "timeouts.stall=1.5")
TIGHT = ("limits.num_pages=65", "sim.step_s=0.002", "limits.checks=[canary]")


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(16, 30000), k=PROMPT)


async def answer(client: Client, seed: int, outputs: int = OUTPUT) -> Answer | MillraceError:
    try:
        return await client.generate(prompt(seed), max_tokens=outputs, ignore_eos=True, timeout=160)
    except grpc.RpcError as error:
        return from_rpc_error(error)


async def computed(client: Client) -> int:
    """Prompts that the workers have taken to compute them."""
    assert client.admin is not None
    workers = (await client.admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers
    first = [worker for worker in workers if worker.info.role != worker_pb2.ROLE_DECODE]
    return sum(load.counters["prompt_tokens"] for worker in first for load in worker.load.replicas)


async def counted(cluster: ControlledCluster, name: str) -> float:
    async with httpx.AsyncClient(base_url=cluster.http_url) as http:
        text = (await http.get("/metrics")).text
    families = text_string_to_metric_families(text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


async def overload(spec: ClusterSpec, requests: int, outputs: int = OUTPUT) -> list[Answer | MillraceError]:
    async with ControlledCluster(spec) as cluster, Client(cluster.grpc_address, cluster.admin_address) as client:
        before = await computed(client)
        found = await asyncio.gather(*(answer(client, seed, outputs) for seed in range(requests)))
        workers = await client.wait_whole()
        served = sum(isinstance(one, Answer) for one in found)
        assert await counted(cluster, "millrace_ejections_total") == 0
        assert await counted(cluster, "millrace_retries_total") == 0
        assert await computed(client) - before == served * PROMPT, "each prompt once, and none that was refused"
        # a few requests may be sent before a worker that is slow to report has reported the ones before
        assert sum(load.counters["preemptions"] for worker in workers for load in worker.load.replicas) <= requests // 8
    return found


def check(found: list[Answer | MillraceError], outputs: int = OUTPUT) -> None:
    for seed, one in enumerate(found):
        if isinstance(one, MillraceError):
            assert one.row.http in (429, 503) and one.retry_after_s > 0, one
        else:
            assert one.tokens == expected(prompt(seed), outputs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "requests"),
    [
        ({"prefill": 0, "decode": 0, "unified": 1}, 16),
        ({"prefill": 1, "decode": 2}, 60),
    ],
    ids=["unified", "two-decode"],
)
async def test_burst_beyond_the_pool_is_answered_and_blames_nobody(shape: dict[str, int], requests: int) -> None:
    limits = (*LIMITS, "timeouts.queue=160")
    found = await overload(ClusterSpec(engine="sim", worker_set=TIGHT, router_set=limits, **shape), requests)
    check(found)
    assert all(isinstance(one, Answer) for one in found), "the queue's limit is longer than all of it takes"


async def test_burst_beyond_the_queue_is_refused_with_a_time_to_come() -> None:
    spec = ClusterSpec(engine="sim", worker_set=TIGHT, router_set=(*LIMITS, "timeouts.queue=4"))
    found = await overload(spec, 16)
    check(found)
    refused = [one for one in found if isinstance(one, MillraceError)]
    assert 0 < len(refused) < len(found)


@pytest.mark.long
async def test_first_burst_has_nobody_who_waits_in_vain() -> None:
    """The pool holds two answers, each 24 steps long, and the queue's time is that of 40 steps: two get a place at
    once, two after the first ones, and all others are refused at once. Steps are long beside what a busy machine takes.
    """
    shape = ("limits.num_pages=18", "sim.step_s=0.5", "limits.checks=[canary]")
    spec = ClusterSpec(engine="sim", worker_set=shape, router_set=("timeouts.queue=20",))
    found = await overload(spec, 30, 24)
    check(found, 24)
    refused = [one for one in found if isinstance(one, MillraceError)]
    assert {one.reason for one in refused} == {"QUEUE_FULL"}, "OVERLOADED: they have waited"
    served = [one for one in found if isinstance(one, Answer)]
    took = min(one.arrivals[-1][0] - one.arrivals[0][0] for one in served)
    assert 2 <= len(served) <= 2 * (1 + int(20 // took)), "no more than this run had time for"


@pytest.mark.long
async def test_decode_workers_of_different_contexts_serve_what_fits() -> None:
    """Half of the decode workers are too small for half of the requests: those go to the others, whole."""
    spec = MixedSpec(engine="sim", decode=2, own={"decode-0": ("limits.max_model_len=712",)})
    async with ControlledCluster(spec) as cluster, Client(cluster.grpc_address, cluster.admin_address) as client:
        async with httpx.AsyncClient(base_url=cluster.http_url) as http:
            (model,) = (await http.get("/v1/models")).json()["data"]
        assert model["max_model_len"] == 8192
        outputs = [1000, 100] * 10
        found = await asyncio.gather(*(answer(client, seed, count) for seed, count in enumerate(outputs)))
        for seed, (one, count) in enumerate(zip(found, outputs, strict=True)):
            assert isinstance(one, Answer), one
            assert one.tokens == expected(prompt(seed), count) and one.finish == "length"
        workers = {worker.address: worker for worker in await client.wait_whole()}
        small = next(w for w in workers.values() if w.info.max_context == 712)
        assert sum(load.counters["output_tokens"] for load in small.load.replicas) > 500, "it serves what it can"
        await cluster.kill("decode-1")
        async with asyncio.timeout(120):
            while (await client.stub.ListModels(_MODELS)).models[0].max_context != 712:
                await asyncio.sleep(0.05)
        refused = await answer(client, 1, 1000)
        assert isinstance(refused, MillraceError) and refused.reason == "CONTEXT_TOO_LONG" and "712" in refused.message


@pytest.mark.long
async def test_pool_below_the_context_is_promised_as_such() -> None:
    spec = ClusterSpec(engine="sim", worker_set=("limits.num_pages=9",))
    async with ControlledCluster(spec) as cluster, Client(cluster.grpc_address, cluster.admin_address) as client:
        most = 8 * 64 + 1
        assert (await client.stub.ListModels(_MODELS)).models[0].max_context == most
        whole = await answer(client, 1, most - PROMPT)
        assert isinstance(whole, Answer) and whole.tokens == expected(prompt(1), most - PROMPT)
        refused = await answer(client, 1, most - PROMPT + 1)
        assert isinstance(refused, MillraceError) and refused.reason == "CONTEXT_TOO_LONG"


@pytest.mark.long
async def test_prompt_that_waits_at_a_worker_outlives_router_limits() -> None:
    """Each prompt takes 1.2 s, and the router gives a worker some seconds of them."""
    slow = ("sim.token_s=0.004", "limits.max_prefill_tokens=300")
    limits = (
        "timeouts.prefill=5",
        "timeouts.handover=5",
        "timeouts.stall=8",
    )  # far above one prompt: machines are busy
    spec = ClusterSpec(engine="sim", worker_set=slow, router_set=limits)
    async with ControlledCluster(spec) as cluster, Client(cluster.grpc_address, cluster.admin_address) as client:
        found = await asyncio.gather(*(answer(client, seed, 4) for seed in range(8)))
        for seed, one in enumerate(found):
            assert isinstance(one, Answer) and one.tokens == expected(prompt(seed), 4), one
        assert await counted(cluster, "millrace_retries_total") == 0
