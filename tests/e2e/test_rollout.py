"""Scale-down, a rolling update of the workers and a roll-out of the routers, under load: no request fails.

Real processes with the simulated engine. Workers live as the chart's pods do (millrace_testing/pods.py), routers find
them through a Kubernetes API server, clients use the channel that docs/operations.md recommends. Answers take longer
than a worker's drain, so that some are handed over in the middle.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from millrace.v1 import admin_pb2, inference_pb2, inference_pb2_grpc
from millrace_cli.cluster import ClusterSpec, LocalCluster
from millrace_rpc.client import routers
from millrace_testing.client import Client
from millrace_testing.kube_server import KubeServer
from millrace_testing.pods import PRE_STOP_S, Pods
from millrace_testing.prometheus import free_port
from millrace_testing.sim import expected

pytestmark = pytest.mark.timeout(180)

CLIENTS = 6
WORKERS = ("engine=sim", "sim.step_s=0.01", "sim.token_s=0.0002", "limits.canary=true", "timeouts.drain=0.5")


class Load:
    """Clients that go on asking. `done` counts right answers; everything else is in `failures`."""

    def __init__(self, target: str) -> None:
        self.done = 0
        self.failures: list[str] = []
        self._target = target

    async def __aenter__(self) -> Load:
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
        async with asyncio.timeout(60):
            while self.done < aim and not self.failures:
                await asyncio.sleep(0.02)
        assert self.failures == []

    async def _run(self, seed: int) -> None:
        own, stub = random.Random(seed), inference_pb2_grpc.InferenceStub(self._channel)
        while True:
            prompt = [own.randrange(16, 30000) for _ in range(own.randint(50, 500))]
            length = own.choice((1, 20, 150))  # the longest takes three times a worker's drain
            request = inference_pb2.GenerateRequest(
                prompt={"token_ids": {"ids": prompt}},
                sampling={"max_tokens": length, "temperature": 0.0, "ignore_eos": True},
            )
            tokens: list[int] = []
            try:
                async for chunk in stub.Generate(request, timeout=60):
                    tokens += chunk.token_ids
            except grpc.aio.AioRpcError as error:
                self.failures.append(f"after {len(tokens)} tokens: {error.code()} {error.details()}")
                continue
            if tokens != expected(prompt, length):
                self.failures.append(f"wrong tokens for a prompt of {len(prompt)}")
            self.done += 1


def router_spec(server: KubeServer, folder: Path, port: int) -> ClusterSpec:
    """A router alone."""
    discovery = (
        "discovery.kind=kubernetes",
        f"discovery.kubernetes.api={server.url}",
        "discovery.kubernetes.selector=app=millrace",
    )
    return ClusterSpec(
        prefill=0, decode=0, engine="sim", grpc_port=port, router_set=discovery, log_dir=folder / f"router-{port}"
    )


async def routable(cluster: LocalCluster, names: set[str]) -> None:
    """Until the router sends requests to these pods and no others."""
    seen: set[str] = set()
    told: dict[str, str] = {}
    async with Client(cluster.grpc_address, cluster.admin_address) as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                while seen != names:
                    assert client.admin is not None
                    workers = (await client.admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers
                    seen = {worker.address for worker in workers if worker.routable}
                    told = {worker.address: worker.detail for worker in workers}
                    await asyncio.sleep(0.05)
    assert seen == names, told


@pytest.fixture
async def server() -> AsyncIterator[KubeServer]:
    async with KubeServer() as running:
        yield running


async def test_workers_come_and_go_without_a_failed_request(server: KubeServer, tmp_path: Path) -> None:
    async with Pods(server, tmp_path, WORKERS) as pods:
        names = ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")
        live = dict(zip(names, await asyncio.gather(*(pods.start(n, n.split("-")[0]) for n in names)), strict=True))
        spec = router_spec(server, tmp_path, free_port())
        async with LocalCluster(spec) as router, Load(router.grpc_address) as load:
            await routable(router, {pod.worker.address for pod in live.values()})
            await load.more(10)
            await live.pop("decode-2").delete()  # scale-down
            await load.more(10)
            for name in tuple(
                live
            ):  # a rolling update of StatefulSets: one after the other, gone before its successor comes
                await live.pop(name).delete()
                live[name] = await pods.start(name, name.split("-")[0])
                await routable(router, {pod.worker.address for pod in live.values()})
            await load.more(10)
            assert load.failures == []


async def test_routers_are_replaced_without_a_failed_request(server: KubeServer, tmp_path: Path) -> None:
    """A Deployment's roll-out with maxUnavailable 0: a new one is ready before an old one goes."""
    ports = [free_port() for _ in range(4)]
    target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)  # what DNS would come to say
    specs = [router_spec(server, tmp_path, port) for port in ports]
    async with Pods(server, tmp_path, WORKERS) as pods, contextlib.AsyncExitStack() as stack:
        await asyncio.gather(pods.start("prefill-0", "prefill"), pods.start("decode-0", "decode"))
        live = [await stack.enter_async_context(LocalCluster(spec)) for spec in specs[:2]]
        load = await stack.enter_async_context(Load(target))
        await load.more(10)
        for spec in specs[2:]:
            live.append(await stack.enter_async_context(LocalCluster(spec)))
            await load.more(5)
            old = live.pop(0)
            await asyncio.sleep(PRE_STOP_S)  # the chart's hook
            await old.kill("router", signal.SIGTERM)
            assert old.processes["router"].returncode == 0
            await load.more(10)
        assert load.failures == []
