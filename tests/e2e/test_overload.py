"""What does not fit into a worker or waits there longer than the router's limits, with real processes."""

import asyncio
import random

import grpc
import httpx
import pytest
from millrace.v1 import inference_pb2
from millrace_cli.cluster import ClusterSpec
from millrace_rpc.errors import MillraceError, from_rpc_error
from millrace_testing.client import Answer, Client
from millrace_testing.cluster import ControlledCluster, MixedSpec
from millrace_testing.samples import total
from millrace_testing.sim import expected

pytestmark = [pytest.mark.long, pytest.mark.asyncio]  # tests/bench/test_fleet.py has bursts

PROMPT = 300
_MODELS = inference_pb2.ListModelsRequest()


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(16, 30000), k=PROMPT)


async def answer(client: Client, seed: int, outputs: int) -> Answer | MillraceError:
    try:
        return await client.generate(prompt(seed), max_tokens=outputs, ignore_eos=True)
    except grpc.RpcError as error:
        return from_rpc_error(error)


async def test_decode_workers_of_different_contexts_serve_what_fits() -> None:
    """Half of the decode workers are too small for half of the requests: those go to the others, whole."""
    spec = MixedSpec(engine="sim", decode=2, own={"decode-0": ("limits.max_model_len=712",)})
    async with ControlledCluster(spec) as cluster, Client(cluster.grpc_address, cluster.admin_address) as client:
        async with httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as http:
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
        while (await client.stub.ListModels(_MODELS)).models[0].max_context != 712:
            await asyncio.sleep(0.05)
        refused = await answer(client, 1, 1000)
        assert isinstance(refused, MillraceError) and refused.reason == "CONTEXT_TOO_LONG" and "712" in refused.message


async def test_pool_below_the_context_is_promised_as_such() -> None:
    spec = ClusterSpec(engine="sim", worker_set=("limits.num_pages=9",))
    async with ControlledCluster(spec) as cluster, Client(cluster.grpc_address, cluster.admin_address) as client:
        most = 8 * 64 + 1
        assert (await client.stub.ListModels(_MODELS)).models[0].max_context == most
        whole = await answer(client, 1, most - PROMPT)
        assert isinstance(whole, Answer) and whole.tokens == expected(prompt(1), most - PROMPT)
        refused = await answer(client, 1, most - PROMPT + 1)
        assert isinstance(refused, MillraceError) and refused.reason == "CONTEXT_TOO_LONG"


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
        assert await total(cluster.http_url, "millrace_retries_total") == 0
