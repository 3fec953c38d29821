"""A new set of pools beside the old, under load: traffic moves when a whole pair of it is ready, and back, and no
request fails.

Real processes with the simulated engine, which says by its tokens which model gave an answer. The steps are those of
docs/how-to/upgrade.md: `helm upgrade` with the new pools, then routers' `routing.revision`, then without the old pools.
"""

import asyncio
import contextlib
import functools
import signal
from pathlib import Path

import pytest
from millrace_serve.engine.sim.runner import SimSettings
from millrace_testing.cluster import ControlledCluster
from millrace_testing.kube_server import KubeServer
from millrace_testing.pods import PRE_STOP_S, Pod, Pods
from millrace_testing.prometheus import free_port
from millrace_testing.rollout import WORKERS, Load, retries, routable, router_spec
from millrace_testing.sim import expected

pytestmark = [pytest.mark.long]

LAYOUT = "limits.page_size=32"  # another fingerprint, the same model
MODEL = SimSettings(vocab_size=16384)
NEW = "routing.revision=b"


def addresses(*pods: Pod) -> set[str]:
    return {pod.worker.address for pod in pods}


async def steps(*pods: Pod) -> float:
    """That these workers have run so far."""
    counts = await asyncio.gather(*(pod.worker.metric("millrace_engine_total", what="steps") for pod in pods))
    return sum(counts)


async def idle(load: Load, *pods: Pod) -> None:
    """Whatever ran there before has ended, and nothing new comes."""
    for pod in pods:
        await pod.worker.whole()
    before = await steps(*pods)
    await load.more(20)
    assert await steps(*pods) == before


async def replaced(old: ControlledCluster) -> None:
    """What a Deployment does to a router once its successor is Ready."""
    await asyncio.sleep(PRE_STOP_S)  # the chart's hook
    await old.kill("router", signal.SIGTERM)
    assert old.processes["router"].returncode == 0


async def test_new_layout_takes_over_and_back_without_a_failed_request(server: KubeServer, tmp_path: Path) -> None:
    ports = [free_port() for _ in range(2)]
    target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
    async with Pods(server, tmp_path, WORKERS) as pods, contextlib.AsyncExitStack() as stack:
        old = await asyncio.gather(pods.start("prefill-0", "prefill"), pods.start("decode-0", "decode"))
        first = await stack.enter_async_context(ControlledCluster(router_spec(server, tmp_path, ports[0])))
        load = await stack.enter_async_context(Load(target))
        await load.more(5)

        prefill = await pods.start("prefill-b-0", "prefill", LAYOUT, revision="b")
        second = await stack.enter_async_context(ControlledCluster(router_spec(server, tmp_path, ports[1], NEW)))
        await replaced(first)
        await prefill.worker.ready()
        await routable(second, addresses(*old))  # half of a pair is nothing, although it is preferred
        await idle(load, prefill)

        new = [prefill, await pods.start("decode-b-0", "decode", LAYOUT, revision="b")]
        await routable(second, addresses(*old, *new))
        await idle(load, *old)

        # Rollback: answers that take longer than the drain go on in the old pair.
        await load.long_answer()
        await asyncio.gather(*(pod.delete() for pod in new))
        await routable(second, addresses(*old))
        assert await retries(second, "DRAINING") > 0
        await load.more(10)

        starts = (
            pods.start("prefill-b-1", "prefill", LAYOUT, revision="b"),
            pods.start("decode-b-1", "decode", LAYOUT, revision="b"),
        )
        new = list(await asyncio.gather(*starts))
        await routable(second, addresses(*old, *new))
        await asyncio.gather(*(pod.delete() for pod in old))
        await routable(second, addresses(*new))
        await load.more(10)
        assert load.failures == []


async def test_new_model_takes_over_without_a_failed_request(server: KubeServer, tmp_path: Path) -> None:
    """Clients ask for either name all the time. Each answer is of one model, whole."""
    ports = [free_port() for _ in range(2)]
    target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
    names = "aliases=[chat-1, chat-2]"
    longer = (*WORKERS, "timeouts.drain=10")  # than the longest answer: no other model goes on with it
    async with Pods(server, tmp_path, longer) as pods, contextlib.AsyncExitStack() as stack:
        old = await asyncio.gather(
            pods.start("prefill-0", "prefill", "served_name=chat-1"),
            pods.start("decode-0", "decode", "served_name=chat-1"),
        )
        first = await stack.enter_async_context(ControlledCluster(router_spec(server, tmp_path, ports[0], names)))
        oracles = expected, functools.partial(expected, settings=MODEL)
        load = await stack.enter_async_context(Load(target, oracles, models=("chat-1", "chat-2", "")))
        await load.more(5)

        model = f"sim.vocab_size={MODEL.vocab_size}", "served_name=chat-2"
        new = await asyncio.gather(
            pods.start("prefill-b-0", "prefill", *model, revision="b"),
            pods.start("decode-b-0", "decode", *model, revision="b"),
        )
        for pod in new:
            await pod.worker.ready()
        await load.more(10)
        await routable(first, addresses(*old))
        assert load.by_oracle[1] == 0, "the old model until the routers are told"

        second = await stack.enter_async_context(ControlledCluster(router_spec(server, tmp_path, ports[1], names, NEW)))
        await routable(second, addresses(*new))
        await replaced(first)
        await idle(load, *old)
        await asyncio.gather(*(pod.delete() for pod in old))
        before = list(load.by_oracle)
        await load.more(20)
        assert load.by_oracle[0] == before[0] and load.by_oracle[1] >= before[1] + 20
        assert load.failures == []
