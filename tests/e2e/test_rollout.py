"""Scale-down, a rolling update of the workers and a roll-out of the routers, under load: no request fails.

Real processes with the simulated engine. Workers live as the chart's pods do (millrace_testing/pods.py), routers find
them through a Kubernetes API server, clients use the channel that docs/how-to/drain.md recommends. Answers take longer
than a worker's drain, so that some are handed over in the middle.
"""

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest
from millrace_testing.cluster import ControlledCluster
from millrace_testing.kube_server import KubeServer
from millrace_testing.pods import PRE_STOP_S, Pods
from millrace_testing.prometheus import free_port
from millrace_testing.rollout import WORKERS, Load, routable, router_spec

pytestmark = [pytest.mark.long]


async def test_workers_come_and_go_without_a_failed_request(server: KubeServer, tmp_path: Path) -> None:
    async with Pods(server, tmp_path, WORKERS) as pods:
        names = ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")
        live = dict(zip(names, await asyncio.gather(*(pods.start(n, n.split("-")[0]) for n in names)), strict=True))
        spec = router_spec(server, tmp_path, free_port())
        async with ControlledCluster(spec) as router, Load(router.grpc_address) as load:
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
        live = [await stack.enter_async_context(ControlledCluster(spec)) for spec in specs[:2]]
        load = await stack.enter_async_context(Load(target))
        await load.more(10)
        for spec in specs[2:]:
            live.append(await stack.enter_async_context(ControlledCluster(spec)))
            await load.more(5)
            old = live.pop(0)
            await asyncio.sleep(PRE_STOP_S)  # the chart's hook
            await old.kill("router", signal.SIGTERM)
            assert old.processes["router"].returncode == 0
            await load.more(10)
        assert load.failures == []
