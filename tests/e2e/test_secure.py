"""A whole system as operators would run it where nobody is trusted: mTLS on every hop, API keys, and traces; and one
without TLS, whose processes know each other by the deployment's secret.
"""

import asyncio
import json
import os
import ssl
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from millrace.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from millrace_cli import access
from millrace_cli.cluster import ClusterSpec, LocalCluster
from millrace_common.reasons import Reason
from millrace_common.tls_config import Tls
from millrace_rpc.client import channel
from millrace_rpc.errors import from_rpc_error
from millrace_rpc.tls import Identity
from millrace_testing import HANG_S
from millrace_testing.certificates import Authority
from millrace_testing.collector import Collector, Seen, collecting

SECRET = "sk-e2e-very-secret-5f1d-0123456789"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
REQUEST = inference_pb2.GenerateRequest(
    prompt={"token_ids": {"ids": list(range(10, 210))}}, sampling={"max_tokens": 6, "seed": 1, "ignore_eos": True}
)
METADATA = (
    ("authorization", f"Bearer {SECRET}"),
    ("traceparent", f"00-{TRACE}-{PARENT}-01"),
    ("x-millrace-decode", "127.0.0.1:1"),
)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with collecting() as made:
        yield made


@pytest.fixture
async def cluster(authority: Authority, collector: Collector, tmp_path: Path) -> AsyncIterator[LocalCluster]:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "team-a", "key": SECRET, "requests_per_s": 1000}]}))
    tracing = f"tracing.endpoint={collector.endpoint}"
    spec = ClusterSpec(
        engine="sim",
        log_dir=tmp_path / "logs",
        tls=Tls.model_validate(authority.tls(tmp_path / "tls", require_client_cert=True)),
        router_set=(f"api_keys={keys}", "metrics=127.0.0.1:0", "log_level=DEBUG", tracing),
        worker_set=("log_level=DEBUG", tracing),
    )
    async with LocalCluster(spec) as running:
        yield running


async def generate(address: str, identity: Identity | None, metadata: tuple[tuple[str, str], ...]) -> list[int]:
    async with channel(address, identity) as ch:
        call = inference_pb2_grpc.InferenceStub(ch).Generate(REQUEST, metadata=metadata, timeout=HANG_S)
        return [token async for response in call for token in response.token_ids]


def one(spans: list[Seen], service: str, name: str) -> Seen:
    (found,) = [span for span in spans if span.service == f"millrace-{service}" and span.name == name]
    return found


async def test_token_through_mutual_tls_with_a_key_and_a_trace(
    cluster: LocalCluster, collector: Collector, authority: Authority, tmp_path: Path
) -> None:
    client = Identity(Tls.model_validate(authority.tls(tmp_path / "client")))
    assert len(await generate(cluster.grpc_address, client, METADATA)) == 6
    await _only_those_who_are_known(cluster, client, authority, tmp_path)
    await _over_https(cluster, client.tls)
    await _the_tree_of_spans(collector)
    await _from_the_command_line(cluster, client.tls)
    ports = cluster.processes["router"].announced() or {}
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{ports['metrics']}/metrics", timeout=HANG_S).read().decode()
    assert 'millrace_tenant_requests_total{status="ok",tenant="team-a"} 3.0' in metrics
    for stage in ("queue", "route", "prefill", "kv_transfer", "first_token", "decode", "total"):
        assert f'millrace_stage_seconds_count{{stage="{stage}"}} 3.0' in metrics
    logs = [process.log_path.read_text() for process in cluster.processes.values()]
    assert all(logs) and not any(SECRET in log or "BEGIN" in log for log in logs)


async def _only_those_who_are_known(
    cluster: LocalCluster, client: Identity, authority: Authority, folder: Path
) -> None:
    user = Identity(Tls.model_validate(authority.tls(folder / "user", "team-a")))
    stranger = Identity(Tls.model_validate(Authority().tls(folder / "stranger") | {"ca": str(client.tls.ca)}))
    for identity, metadata, reason in (
        (client, (), Reason.UNAUTHENTICATED),
        (client, (("authorization", f"Bearer {SECRET}x"),), Reason.UNAUTHENTICATED),
        (None, METADATA, Reason.WORKER_LOST),
        (stranger, METADATA, Reason.WORKER_LOST),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(cluster.grpc_address, identity, metadata)
        assert from_rpc_error(caught.value).reason is reason
    for name in ("prefill-0", "decode-0"):
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(cluster.address(name), None, METADATA)
        assert await info(cluster.address(name), client) is None
        for other in (None, user, stranger):
            assert await info(cluster.address(name), other) in (Reason.UNAUTHENTICATED, Reason.WORKER_LOST)
    assert await info(cluster.address("prefill-0"), user) is Reason.UNAUTHENTICATED


async def info(address: str, identity: Identity | None, token: str = "") -> Reason | None:
    """Why a worker says nothing about itself; None: it does."""
    async with channel(address, identity, token) as ch:
        try:
            await worker_pb2_grpc.WorkerServiceStub(ch).GetInfo(worker_pb2.GetInfoRequest(), timeout=HANG_S)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error).reason
        return None


@pytest.mark.long
async def test_system_without_tls_has_one_secret(tmp_path: Path) -> None:
    """Routing, warm-up, transfer and prefix fetches between workers, the tools: all show the secret, and nobody else
    gets in.
    """
    ours, other = tmp_path / "secret", tmp_path / "other"
    ours.write_text("of this deployment: 7c1f")
    other.write_text("of another deployment: 7c")
    spec = ClusterSpec(engine="sim", log_dir=tmp_path / "logs", secret=ours)
    async with LocalCluster(spec) as cluster:
        assert len(await generate(cluster.grpc_address, None, ())) == 6
        address = cluster.address("prefill-0")
        for secret, why in ((None, "sent no token"), (other, "has another secret"), (ours, "")):
            assert await info(address, None, access.token(secret)) is (Reason.UNAUTHENTICATED if why else None)
            command = [sys.executable, "-m", "millrace_cli", "weights", address, "pause" if why else "resume"]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            env |= {"MILLRACE_SECRET_FILE": str(secret)} if secret else {}
            process = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE)
            output, _ = await asyncio.wait_for(process.communicate(), HANG_S)
            assert process.returncode == bool(why) and why in output.decode()
        assert len(await generate(cluster.grpc_address, None, ())) == 6
        logs = [process.log_path.read_text() for process in cluster.processes.values()]
    assert all(logs) and not any(ours.read_text() in log or access.token(ours) in log for log in logs)


async def _over_https(cluster: LocalCluster, tls: Tls) -> None:
    context = ssl.create_default_context(cafile=str(tls.ca))
    with pytest.raises(httpx.TransportError):
        async with httpx.AsyncClient(verify=context, timeout=HANG_S) as anybody:
            await anybody.get(f"{cluster.http_url}/health")
    with pytest.raises(httpx.TransportError):
        async with httpx.AsyncClient(verify=context, timeout=HANG_S) as anybody:
            await anybody.get(f"{cluster.admin_http_url}/workers")
    context.load_cert_chain(str(tls.cert), str(tls.key))
    async with httpx.AsyncClient(verify=context, timeout=HANG_S, base_url=cluster.http_url) as known:
        assert (await known.get("/ready")).status_code == 200
        assert len((await known.get(f"{cluster.admin_http_url}/workers")).json()["workers"]) == 2
        refused = await known.get("/v1/models")
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "unauthenticated"
        body = {"model": "", "prompt": list(range(10, 210)), "max_tokens": 3, "seed": 1, "ignore_eos": True}
        known.headers["authorization"] = f"Bearer {SECRET}"
        body["model"] = (await known.get("/v1/models")).json()["data"][0]["id"]
        answer = await known.post("/v1/completions", json=body)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3


async def _from_the_command_line(cluster: LocalCluster, tls: Tls) -> None:
    """The key comes in the environment."""
    options = [item for key in ("ca", "cert", "key") for item in (f"--tls-{key}", str(getattr(tls, key)))]
    for command in (["generate", "hello", "--max-tokens", "2", "--json"], ["workers"]):
        address = cluster.admin_address if command == ["workers"] else cluster.grpc_address
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "millrace_cli", *command, "--address", address, *options),
            env={**os.environ, "MILLRACE_API_KEY": SECRET, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await asyncio.wait_for(process.communicate(), HANG_S)
        assert process.returncode == 0 and output


async def _the_tree_of_spans(collector: Collector) -> None:
    wanted = {("router", "generate"), ("router", "route"), ("router", "queue"), ("router", "attempt")}
    wanted |= {("prefill", "prefill"), ("prefill", "queue"), ("decode", "transfer"), ("decode", "decode")}
    spans = await collector.until({(f"millrace-{service}", name) for service, name in wanted}, TRACE)
    root, attempt = one(spans, "router", "generate"), one(spans, "router", "attempt")
    assert root.parent == PARENT and root.attributes["millrace.tenant"] == "team-a" and not root.error
    assert {one(spans, "router", name).parent for name in ("route", "queue", "attempt")} == {root.id}
    prefill, transfer, decode = (
        one(spans, *names) for names in (("prefill", "prefill"), ("decode", "transfer"), ("decode", "decode"))
    )
    assert {prefill.parent, transfer.parent, decode.parent} == {attempt.id}
    assert one(spans, "prefill", "queue").parent == prefill.id
    assert one(spans, "decode", "queue").parent == transfer.id
    assert attempt.attributes["millrace.route.kind"] == "pair" and attempt.attributes["millrace.output_tokens"] == 6
    assert transfer.end <= decode.start < decode.end and root.start <= attempt.start < prefill.end
    assert all(span.start <= span.end and not span.error for span in spans)
