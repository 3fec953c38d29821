"""What is refused is refused before any work by the whole system. What that is, and that both APIs say the same of it:
tests/router/apis/openai/test_errors.py.
"""

import asyncio

import grpc
import httpx
import pytest
from millrace.v1 import admin_pb2, worker_pb2
from millrace_cli.cluster import ClusterSpec, LocalCluster
from millrace_cli.errors import CommandError
from millrace_cli.weights import act
from millrace_testing.client import Client
from millrace_testing.command import Run
from millrace_testing.inside_cluster import InsideCluster
from millrace_testing.shared import shared

pytestmark = pytest.mark.asyncio(loop_scope="module")
cluster = shared(lambda: InsideCluster(ClusterSpec(engine="sim")))


@pytest.mark.parametrize(
    ("arguments", "port", "message"),
    [
        (["generate", "x", "--temperature", "101"], "grpc", "temperature must be between 0 and 100, not 101.0"),
        (["generate", "x", "--max-tokens", "100000"], "grpc", "max_tokens"),
        (["generate", "x"], "http", "speaks HTTP; this command asks a router's gRPC API, port 50051 by default, which"),
        (["generate", "x"], "admin", "is another gRPC port; this command asks a router's gRPC API, port 50051"),
        (["workers"], "grpc", "is another gRPC port; this command asks a router's admin port, 50052 by default"),
        (["workers"], "http", "speaks HTTP; this command asks a router's admin port, 50052 by default, which"),
        (["workers"], "admin_http", "speaks HTTP; this command asks a router's admin port"),
    ],
)
async def test_command_says_in_one_line_what_is_wrong(
    cluster: LocalCluster, millrace: Run, arguments: list[str], port: str, message: str
) -> None:
    code, _, said = await millrace(*arguments, "--address", cluster.address("router", port))
    assert code == 1 and said.startswith("millrace: ") and said.count("\n") == 1 and message in said


@pytest.mark.parametrize(("port", "what"), [("grpc", "is another gRPC port"), ("http", "speaks HTTP")])
async def test_weights_are_set_by_workers_alone(
    cluster: LocalCluster, port: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address = cluster.address("router", port)
    with pytest.raises(CommandError, match=f"1 of 1 workers failed: {address}"):
        await act([address], worker_pb2.SetWeightsRequest())
    assert f"{address} {what}; this command asks a worker's gRPC port" in capsys.readouterr().out


async def test_no_work_is_done_for_a_refused_request(cluster: LocalCluster) -> None:
    async with Client(cluster.grpc_address, cluster.admin_address) as client:
        before = prompt_tokens(await client.wait_whole())
        with pytest.raises(grpc.aio.AioRpcError):
            await client.generate([20] * 40_000, max_tokens=5)
        assert len((await client.generate([20] * 100, max_tokens=5)).tokens) == 5
        # loads come to the router a little later than tokens
        while (after := prompt_tokens(await client.wait_whole())) < before + 100:
            await asyncio.sleep(0.05)
        assert after < before + 1000  # of the 40,000 none; a few may be of a client that was gone
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as http:
        metrics = (await http.get("/metrics")).text
    assert "millrace_active_requests 0.0" in metrics and "millrace_queue_requests 0.0" in metrics  # none is forgotten


def prompt_tokens(workers: list[admin_pb2.WorkerStatus]) -> int:
    """Computed by the prefill worker since it started."""
    return sum(w.load.replicas[0].counters["prompt_tokens"] for w in workers if w.info.role == worker_pb2.ROLE_PREFILL)
