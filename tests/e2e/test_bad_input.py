"""What is refused is refused before any work, with one clear message, alike on gRPC and HTTP, by the whole system."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
import pytest_asyncio
from google.protobuf.message import Message
from millrace.v1 import admin_pb2, common_pb2, inference_pb2, worker_pb2
from millrace_cli.cluster import ClusterSpec, LocalCluster
from millrace_cli.errors import CommandError
from millrace_cli.weights import act
from millrace_rpc.errors import from_rpc_error
from millrace_testing.client import Client

pytestmark = pytest.mark.asyncio(loop_scope="module")

INF, NAN = float("inf"), float("nan")
BAD = {  # name: (SamplingParams of gRPC, further fields of GenerateRequest, JSON of /v1/completions)
    "max_tokens over the context": ({"max_tokens": 100_000}, {}, {"max_tokens": 100_000}),
    "max_tokens 0": ({"max_tokens": 0}, {}, {"max_tokens": 0}),
    "negative temperature": ({"temperature": -1}, {}, {"temperature": -1}),
    "huge temperature": ({"temperature": 1e9}, {}, {"temperature": 1e9}),
    "NaN temperature": ({"temperature": NAN}, {}, {"temperature": NAN}),
    "infinite top_p": ({"top_p": INF}, {}, {"top_p": INF}),
    "top_p 0": ({"top_p": 0}, {}, {"top_p": 0}),
    "min_p over 1": ({"min_p": 1.5}, {}, {"min_p": 1.5}),
    "repetition_penalty 0": ({"repetition_penalty": 0}, {}, {"repetition_penalty": 0}),
    "presence_penalty": ({"presence_penalty": 3}, {}, {"presence_penalty": 3}),
    "frequency_penalty": ({"frequency_penalty": -3}, {}, {"frequency_penalty": -3}),
    "logprobs over 20": ({"logprobs": 21}, {}, {"logprobs": 21}),
    "min_tokens over max_tokens": ({"min_tokens": 9, "max_tokens": 8}, {}, {"min_tokens": 9, "max_tokens": 8}),
    "stop token out of range": ({"stop_token_ids": [10**6]}, {}, {"stop_token_ids": [10**6]}),
    "logit_bias out of range": ({"logit_bias": {10**6: 1.0}}, {}, {"logit_bias": {"1000000": 1.0}}),
    "17 stop strings": ({}, {"stop": [str(i) for i in range(17)]}, {"stop": [str(i) for i in range(17)]}),
    "empty stop string": ({}, {"stop": [""]}, {"stop": [""]}),
    "n over the limit": ({}, {"n": 17}, {"n": 17}),
    "n 0": ({}, {"n": 0}, {"n": 0}),
    "unknown model": ({}, {"model": "gpt-9"}, {"model": "gpt-9"}),
    "empty prompt": ({}, {"prompt": inference_pb2.Prompt()}, {"prompt": ""}),
    "no token ids": ({}, {"prompt": inference_pb2.Prompt(token_ids={})}, {"prompt": []}),
    "token id out of range": ({}, {"prompt": inference_pb2.Prompt(token_ids={"ids": [10**6]})}, {"prompt": [10**6]}),
    "prompt over the context": (
        {},
        {"prompt": inference_pb2.Prompt(token_ids={"ids": [20] * 40_000})},
        {"prompt": [20] * 40_000},
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    async with LocalCluster(ClusterSpec(engine="sim")) as cluster:
        yield cluster


async def refused_by_grpc(client: Client, request: Message) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in client.stub.Generate(request, timeout=20):
            pass
    return caught.value


async def test_same_refusal_on_grpc_and_http(cluster: LocalCluster) -> None:
    async with Client(cluster.grpc_address) as client, httpx.AsyncClient(base_url=cluster.http_url) as http:
        for name in BAD:
            await check_refusal(name, client, http)


async def check_refusal(name: str, client: Client, http: httpx.AsyncClient) -> None:
    sampling, fields, json_fields = BAD[name]
    request = inference_pb2.GenerateRequest(
        **{"prompt": inference_pb2.Prompt(text="hello"), "sampling": common_pb2.SamplingParams(**sampling), **fields}
    )
    error = from_rpc_error(await refused_by_grpc(client, request))
    body = json.dumps({"model": "", "prompt": "hello", **json_fields})  # writes NaN and Infinity as Python does
    answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == error.row.http and answer.status_code in (400, 404), (name, answer.text)
    shown = answer.json()["error"]
    assert (shown["type"], shown["code"]) == ("invalid_request_error", error.reason.lower()), name
    if name not in ("NaN temperature", "infinite top_p"):  # JSON has no such numbers; its parser words it
        assert shown["message"] == error.message, name
    assert len(error.message) > 10, name


@pytest.mark.parametrize(
    ("arguments", "port", "message"),
    [
        (["generate", "x", "--temperature", "-1"], "grpc", "temperature must be between 0 and 100, not -1.0"),
        (["generate", "x", "--max-tokens", "100000"], "grpc", "max_tokens"),
        (["generate", "x"], "http", "speaks HTTP; this command asks a router's gRPC API, port 50051 by default, which"),
        (["generate", "x"], "admin", "is another gRPC port; this command asks a router's gRPC API, port 50051"),
        (["workers"], "grpc", "is another gRPC port; this command asks a router's admin port, 50052 by default"),
        (["workers"], "http", "speaks HTTP; this command asks a router's admin port, 50052 by default, which"),
        (["workers"], "admin_http", "speaks HTTP; this command asks a router's admin port"),
    ],
)
async def test_command_says_in_one_line_what_is_wrong(
    cluster: LocalCluster, arguments: list[str], port: str, message: str
) -> None:
    command = [sys.executable, "-m", "millrace_cli", *arguments, "--address", cluster.address("router", port)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1 and said.startswith(b"millrace: ") and said.count(b"\n") == 1
    assert message in said.decode()


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
        too_long = inference_pb2.Prompt(token_ids={"ids": [20] * 40_000})
        await refused_by_grpc(client, inference_pb2.GenerateRequest(prompt=too_long))
        assert len((await client.generate([20] * 100, max_tokens=5)).tokens) == 5
        async with asyncio.timeout(120):  # loads come to the router a little later than tokens
            while (after := prompt_tokens(await client.wait_whole())) < before + 100:
                await asyncio.sleep(0.05)
        assert after < before + 1000  # of the 40,000 none; a few may be of a client that was gone
    async with httpx.AsyncClient(base_url=cluster.http_url) as http:
        metrics = (await http.get("/metrics")).text
    assert "millrace_active_requests 0.0" in metrics and "millrace_queue_requests 0.0" in metrics  # none is forgotten


def prompt_tokens(workers: list[admin_pb2.WorkerStatus]) -> int:
    """Computed by the prefill worker since it started."""
    return sum(w.load.replicas[0].counters["prompt_tokens"] for w in workers if w.info.role == worker_pb2.ROLE_PREFILL)
