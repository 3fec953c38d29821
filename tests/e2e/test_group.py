"""A worker of two pods: the chart's own configuration, script and environment with a real Ray, as on Kubernetes."""

import asyncio
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from millrace.v1 import worker_pb2, worker_pb2_grpc
from millrace_rpc.access import token
from millrace_rpc.client import channel
from millrace_testing.fake_router import FakeLink, request
from millrace_testing.group import Group, Pod, missing

pytestmark = [pytest.mark.long]

READY_S = SOON_S = 600.0  # 16 on two idle cores, more than 60 on busy ones
START_S = 600.0  # until Ray runs in a pod, which nobody waits for
TOKENS = 150
SIM = "workers.group.config.engine=sim"


@pytest.fixture(autouse=True, scope="module")
def _machine() -> None:
    if lacks := missing():
        pytest.skip(lacks)


async def test_group_starts_and_drains(tmp_path: Path) -> None:
    sets = ("workers.group.drain.preStop=1", "workers.group.config.limits.max_model_len=1024")
    async with Group(tmp_path, *sets) as group:
        # A Service of ours in place of LeaderWorkerSet's would not give the name before the leader is ready.
        await group.until(group.follower, f"{group.leader_name}:6379: .*Name or service not known", SOON_S)
        await group.until(group.leader, "waiting for pods: Ray has 1, too few for 2 ranks", START_S)
        assert not await group.is_ready()
        await only_pinned_ports(group.leader)
        group.publish()
        await group.ready(READY_S)
        await only_who_has_the_token_is_heard(group.leader)
        await drains(group)


async def only_pinned_ports(pod: Pod) -> None:
    """Before there are ranks: every port is one of the chart's, but that of the frontend's inbox."""
    listing = await pod.run("ss", "-Hltnp")
    text = (await listing.communicate())[0].decode()
    listening = {int(port): by for port, by in re.findall(r":(\d+)\s+\S+\s+users:\(\((.*)\)\)", text)}
    flags = dict(re.findall(r"--([a-z-]+)-port=(\d+)", pod.variables["RAY_FLAGS"]))
    workers = range(int(flags.pop("min-worker")), int(flags.pop("max-worker")) + 1)
    pinned = {int(port) for port in flags.values()} | {int(pod.variables["RAY_PORT"]), 50061, 9090, 9091}
    others = {port: by for port, by in listening.items() if port not in pinned and port not in workers}
    assert listening.keys() >= {6379, 6380, 6381, 9091}, text
    assert [by.count("pid=1,") for by in others.values()] == [1], text


async def only_who_has_the_token_is_heard(pod: Pod) -> None:
    async with grpc.aio.insecure_channel(f"{pod.ip}:{pod.variables['RAY_PORT']}") as ch:
        nodes = ch.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await nodes(b"", timeout=SOON_S)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        bearer = pod.variables["RAY_AUTH_TOKEN"]
        assert len(bearer) == 48 and await nodes(b"", metadata=[("authorization", f"Bearer {bearer}")], timeout=SOON_S)


async def drains(group: Group) -> None:
    """Both pods are told to end while requests run on both; the follower stays until the leader has finished."""
    async with channel(f"{group.leader.ip}:50061", token=token(group.secret.encode().strip())) as ch:
        info = await worker_pb2_grpc.WorkerServiceStub(ch).GetInfo(worker_pb2.GetInfoRequest(), timeout=SOON_S)
        worker = SimpleNamespace(role="unified", channel=ch, epoch=info.epoch)
        async with FakeLink(worker) as link:  # type: ignore[arg-type]  # all that it needs
            running = [request(range(100, 140), max_tokens=TOKENS) for _ in range(2)]
            for replica, one in enumerate(running):
                one.replica = replica
                await link.begun(one)
            group.withdraw()
            follower = asyncio.create_task(group.follower.delete())
            code = await group.leader.delete()
            assert code == 0, group.logs()
            for one in running:
                assert (await link.finish(one)).finish_reason and len(link.tokens(one)) == TOKENS
    assert group.leader.says("SIGTERM: draining") and group.leader.says("stopping: drained")
    assert not follower.done(), "the follower has gone before the leader"
    await asyncio.wait_for(follower, SOON_S)


async def test_leader_ends_when_a_follower_is_lost(tmp_path: Path) -> None:
    async with Group(tmp_path, SIM) as group:
        group.publish()
        await group.ready(READY_S)
        (raylet,) = group.follower.processes("raylet")
        raylet.kill()
        assert await group.leader.ended(SOON_S) == 1
        lost = rf"rank \d ended \(on {group.follower.ip}: Actor(Died|Unavailable)Error: "
        assert group.leader.says(lost), group.logs()
        assert await group.follower.ended(SOON_S) != 0


async def test_host_that_is_cut_off_is_noticed(tmp_path: Path) -> None:
    async with Group(tmp_path, SIM) as group:
        group.publish()
        await group.ready(READY_S)
        group.cut()
        ended = rf"ended \(on {group.follower.ip}: ActorDiedError: "  # by Ray, or by the heartbeats that do not come
        await group.until(group.leader, rf"rank \d ({ended}|hangs: no sign of its process)", SOON_S)
        assert await group.leader.ended(SOON_S) == 1


async def test_follower_ends_when_the_leader_is_lost(tmp_path: Path) -> None:
    wait = "workers.group.env.RAY_gcs_rpc_server_reconnect_timeout_s=5"  # Ray's own is 60
    async with Group(tmp_path, SIM, wait) as group:
        group.publish()
        await group.until(group.follower, "Ray runtime started", START_S)
        group.leader.send(signal.SIGKILL)
        assert await group.leader.ended(SOON_S) != 0
        assert await group.follower.ended(SOON_S) != 0
