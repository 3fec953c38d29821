"""Clients under load, and routers, of the tests that replace workers and routers while requests run."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import grpc
from millrace.v1 import admin_pb2, inference_pb2, inference_pb2_grpc
from millrace_cli.cluster import ClusterSpec
from millrace_rpc.client import routers

from millrace_testing.client import Client
from millrace_testing.cluster import ControlledCluster
from millrace_testing.kube_server import KubeServer
from millrace_testing.samples import total
from millrace_testing.sim import expected

CLIENTS = 6
LENGTHS = (1, 10, 100)  # of answers; the longest takes four times the drain of a worker of WORKERS
WORKERS = ("engine=sim", "sim.step_s=0.02", "sim.token_s=0.0002", "limits.checks=[canary]", "timeouts.drain=0.5")


Oracle = Callable[[list[int], int], list[int]]  # prompt, length


class Load:
    """Clients that go on asking for the model by one of its names. `done` counts right answers by the oracle that gave
    them; everything else is in `failures`.
    """

    def __init__(self, target: str, oracles: Sequence[Oracle] = (expected,), models: Sequence[str] = ("",)) -> None:
        self.by_oracle = [0] * len(oracles)
        self.failures: list[str] = []
        self._longest = asyncio.Event()  # the first tokens of a longest answer have come
        self._target, self._oracles, self._models = target, oracles, models

    @property
    def done(self) -> int:
        return sum(self.by_oracle)

    async def __aenter__(self) -> Self:
        self._channel = routers(self._target)
        self._tasks = [asyncio.create_task(self._run(seed)) for seed in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def more(self, number: int) -> None:
        """Until so many more requests have been answered, or one has failed."""
        aim = self.done + number
        while self.done < aim and not self.failures:
            await asyncio.sleep(0.02)
        assert self.failures == []

    async def long_answer(self) -> None:
        """Until one begins that takes longer than a drain."""
        self._longest.clear()
        await self._longest.wait()

    async def _run(self, seed: int) -> None:
        own, stub = random.Random(seed), inference_pb2_grpc.InferenceStub(self._channel)
        while True:
            prompt = [own.randrange(16, 16000) for _ in range(own.randint(50, 500))]
            length = own.choice(LENGTHS)
            request = inference_pb2.GenerateRequest(
                model=own.choice(self._models),
                prompt={"token_ids": {"ids": prompt}},
                sampling={"max_tokens": length, "temperature": 0.0, "ignore_eos": True},
            )
            tokens: list[int] = []
            try:
                async for chunk in stub.Generate(request):
                    if not tokens and length == max(LENGTHS):
                        self._longest.set()
                    tokens += chunk.token_ids
            except grpc.aio.AioRpcError as error:
                self.failures.append(f"after {len(tokens)} tokens: {error.code()} {error.details()}")
                continue
            for i, oracle in enumerate(self._oracles):
                if tokens == oracle(prompt, length):
                    self.by_oracle[i] += 1
                    break
            else:
                self.failures.append(f"wrong tokens for a prompt of {len(prompt)}")


def router_spec(server: KubeServer, folder: Path, port: int, *sets: str) -> ClusterSpec:
    """A router alone."""
    discovery = (
        "discovery.kind=kubernetes",
        f"discovery.kubernetes.api={server.url}",
        "discovery.kubernetes.selector=app=millrace",
    )
    return ClusterSpec(
        prefill=0,
        decode=0,
        engine="sim",
        ports={"grpc": port},
        router_set=(*discovery, *sets),
        log_dir=folder / f"router-{port}",
    )


async def routable(cluster: ControlledCluster, names: set[str]) -> None:
    """Until the router sends requests to these pods and no others."""
    seen: set[str] = set()
    told: dict[str, str] = {}
    async with Client(cluster.grpc_address, cluster.admin_address) as client:
        with contextlib.suppress(TimeoutError):
            while seen != names:
                assert client.admin is not None
                workers = (await client.admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers
                seen = {worker.address for worker in workers if worker.routable}
                told = {worker.address: worker.detail for worker in workers}
                await asyncio.sleep(0.05)
    assert seen == names, told


async def retries(router: ControlledCluster, reason: str) -> float:
    """Further attempts of this router so far, after one that failed for this reason."""
    return await total(router.http_url, "millrace_retries_total", reason=reason)
