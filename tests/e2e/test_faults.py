"""Rows of the fault matrix of docs/explanation/kv-failures.md, against real processes with a simulated engine.

test_chaos.py has other rows.

The simulated engine's tokens depend on the prompt and the position only, and each of its KV pages carries the hash of
its tokens, which is checked before every step: a page of another request, or one reused too early, is an error, never
a token. So a test can say exactly which tokens the client must see, whatever dies.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import random
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from millrace.v1 import admin_pb2, worker_pb2
from millrace_cli.cluster import ClusterSpec
from millrace_serve.engine.core import SamplingParams
from millrace_serve.engine.sim.runner import SimSettings
from millrace_serve.handover.failed_reads import READER_ALONE
from millrace_testing.client import Answer, Client, collect, until
from millrace_testing.cluster import ControlledCluster, with_workers
from millrace_testing.faulty_worker import FLAG
from millrace_testing.oracle import oracle_outputs
from millrace_testing.procs import PYTHONPATH
from millrace_testing.samples import samples
from millrace_testing.shared import shared

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFILL, DECODE = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE
SLOW_PREFILL = ("sim.token_s=0.0004",)  # 0.8 s for 2,000 tokens
SLOW_DECODE = ("sim.step_s=0.01",)
TOKENS = 400  # 4 s of these steps


def spec(*worker_set: str, prefill: int = 2, decode: int = 2, router_set: tuple[str, ...] = ()) -> ClusterSpec:
    return ClusterSpec(
        prefill=prefill,
        decode=decode,
        engine="sim",
        worker_set=("limits.checks=[canary]", "timeouts.lease=3", *worker_set),
        router_set=router_set,
    )


def make_prompt(seed: int, length: int = 2000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 30000) for _ in range(length)]


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    return oracle_outputs(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), SimSettings())


def client_of(cluster: ControlledCluster) -> Client:
    return Client(cluster.grpc_address, cluster.admin_address)


async def busy(client: Client, role: int, what: Callable[[admin_pb2.WorkerStatus], bool]) -> str:
    """Address of a worker of `role` for which `what` is true, as soon as there is one."""
    while True:
        workers = (await client.admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers
        for worker in workers:
            if worker.info.role == role and worker.load.replicas and what(worker):
                return worker.address
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def always_busy(client: Client, prompt_tokens: int = 2000, max_tokens: int = 20) -> AsyncIterator[None]:
    """Three requests for each worker, one set after the other: a test that comes late finds some under way."""
    over, seeds = asyncio.Event(), itertools.count(1000)

    async def ask() -> None:
        while not over.is_set():
            prompt = make_prompt(next(seeds), prompt_tokens)
            await finish(asyncio.create_task(client.generate(prompt, max_tokens=max_tokens)), prompt, max_tokens)

    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(ask())
        yield
        over.set()


two_of_each = shared(lambda: ControlledCluster(spec(*SLOW_PREFILL, *SLOW_DECODE)))  # slow workers


async def retries(cluster: ControlledCluster) -> dict[str, float]:
    """How often the router tried again, by the reason of the failed attempt."""
    return {one.labels["reason"]: one.value for one in await samples(cluster.http_url, "millrace_retries_total")}


async def more_retries(cluster: ControlledCluster, before: dict[str, float]) -> dict[str, float]:
    now = await retries(cluster)
    return {reason: now[reason] - before.get(reason, 0) for reason in now if now[reason] != before.get(reason)}


def name_of(cluster: ControlledCluster, address: str) -> str:
    return next(name for name in cluster.spec.workers() if cluster.address(name) == address)


async def finish(task: asyncio.Task[Answer], prompt: list[int], max_tokens: int) -> Answer:
    answer = await task
    assert answer.tokens == expected(prompt, max_tokens)
    assert answer.finish == "length"
    return answer


@contextlib.asynccontextmanager
async def streams_that_survive(cluster: ControlledCluster, client: Client) -> AsyncIterator[None]:
    """Streams on all decode workers. They see each token once, and those of the body's victim are tried again."""
    before, prompts = await retries(cluster), [make_prompt(seed, 50) for seed in range(6)]
    answers = [Answer() for _ in prompts]

    async def run(prompt: list[int], answer: Answer) -> Answer:
        async for chunk in client.stream(prompt, max_tokens=TOKENS):
            collect(answer, chunk)
        return answer

    tasks = [asyncio.create_task(run(p, a)) for p, a in zip(prompts, answers, strict=True)]
    await until(lambda: all(len(answer.tokens) >= 30 for answer in answers), what="30 tokens each")
    yield
    for prompt, task in zip(prompts, tasks, strict=True):
        await finish(task, prompt, TOKENS)
    assert (await more_retries(cluster, before)).keys() == {"WORKER_LOST"}


async def test_prefill_worker_dies_while_it_computes(two_of_each: ControlledCluster) -> None:
    cluster, before = two_of_each, await retries(two_of_each)
    async with client_of(cluster) as client:
        async with always_busy(client):
            victim = name_of(cluster, await busy(client, PREFILL, lambda worker: worker.load.replicas[0].running > 0))
            await cluster.kill(victim)
        assert (await more_retries(cluster, before))["WORKER_LOST"] >= 1  # those that were there
        await cluster.restart(victim)


async def test_decode_worker_dies_in_the_middle_of_a_stream(two_of_each: ControlledCluster) -> None:
    cluster = two_of_each
    async with client_of(cluster) as client:
        async with streams_that_survive(cluster, client):
            await cluster.kill("decode-0")
        await cluster.restart("decode-0")
        await cluster.wait_routable()
        await client.wait_whole()


@pytest.mark.long
async def test_lease_expires_while_the_decode_worker_stalls() -> None:
    settings = (*SLOW_PREFILL, "timeouts.lease=0.3")
    async with (
        ControlledCluster(spec(*settings, prefill=1, decode=1, router_set=("timeouts.silence=10",))) as cluster,
        client_of(cluster) as client,
    ):
        prompt = make_prompt(3)
        task = asyncio.create_task(client.generate(prompt, max_tokens=20))
        await busy(client, DECODE, lambda worker: worker.in_flight > 0)
        cluster.send("decode-0", signal.SIGSTOP)
        await busy(client, PREFILL, lambda worker: worker.load.replicas[0].exporting > 0)
        await busy(client, PREFILL, lambda worker: worker.load.replicas[0].exporting == 0)  # the lease ran out
        cluster.send("decode-0", signal.SIGCONT)
        await finish(task, prompt, 20)
        (reason,) = (found := await retries(cluster))
        # gRPC sometimes says of a stream whose end and messages come together that it broke
        assert found[reason] == 1 and reason in ("KV_EXPIRED", "TRANSFER_FAILED")
        await client.wait_whole()


@pytest.mark.long
async def test_decode_worker_whose_reads_fail_in_a_row_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor has to start it anew. The single prefill worker, which may be at fault too, goes on."""
    fault = tmp_path / "kv-fault"
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv(FLAG, str(fault))
    faulty = dataclasses.replace(spec(prefill=1, decode=1), command=with_workers("faulty_worker"))
    async with ControlledCluster(faulty) as cluster, client_of(cluster) as client:
        answer = await client.generate(make_prompt(1, 200), max_tokens=5)
        assert answer.tokens == expected(make_prompt(1, 200), 5)
        fault.write_text("all reads")
        process = cluster.processes["decode-0"]
        for seed in range(100):
            if not process.running:
                break
            with contextlib.suppress(Exception):  # a request ends as it may
                await client.generate(make_prompt(100 + seed, 200), max_tokens=5, timeout=5.0)
        assert await process.wait() == 1
        assert f"failed {READER_ALONE} times in a row" in process.log_tail()
        fault.unlink()
        await cluster.restart("decode-0")
        await cluster.wait_routable("decode-0")
        answer = await client.generate(make_prompt(2, 200), max_tokens=5)
        assert answer.tokens == expected(make_prompt(2, 200), 5)
        await client.wait_whole()


async def test_client_goes_away_at_any_moment(two_of_each: ControlledCluster) -> None:
    """Queued, while some prompt is computed or on its way, after the first tokens and after more."""
    async with client_of(two_of_each) as client:

        async def one(seed: int) -> None:
            call = client.stream(make_prompt(seed, 500), max_tokens=400)
            moment = seed % 5
            if moment == 1:
                await busy(client, PREFILL, lambda worker: worker.load.replicas[0].running > 0)
            elif moment == 2:
                await busy(client, DECODE, lambda worker: worker.in_flight > 0)
            elif moment:
                for _ in range(1 if moment == 3 else 20):
                    await call.read()
            call.cancel()

        async with always_busy(client, prompt_tokens=500):
            for start in range(0, 30, 10):
                await asyncio.gather(*(one(seed) for seed in range(start, start + 10)))
        await client.wait_whole()
        prompt = make_prompt(7, 500)
        await finish(asyncio.create_task(client.generate(prompt, max_tokens=30)), prompt, 30)
        await client.wait_whole()
