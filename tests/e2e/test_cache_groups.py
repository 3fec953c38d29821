"""Tenants of a whole system: nobody learns from cached_tokens what others have sent."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from millrace.v1 import inference_pb2
from millrace_cli.cluster import ClusterSpec, LocalCluster
from millrace_testing.client import Answer, Client, collect
from millrace_testing.sim import expected, prompt_of

pytestmark = pytest.mark.timeout(180)

PROMPT = prompt_of(1000)
CACHED = 15 * 64
GROUPS = {"a": None, "b": None, "c": "team", "d": "team"}


def secret(name: str) -> str:
    return f"sk-secret-of-{name}-0123456789abcdefghij"


async def over_grpc(client: Client, name: str) -> int:
    """Cached tokens of the prompt."""
    answer = Answer()
    request = inference_pb2.GenerateRequest(
        prompt={"token_ids": {"ids": PROMPT}}, sampling={"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    )
    async for chunk in client.stub.Generate(
        request, metadata=(("authorization", f"Bearer {secret(name)}"),), timeout=60
    ):
        collect(answer, chunk)
    assert answer.tokens == expected(PROMPT, 5)
    await client.wait_whole()
    return answer.usage.cached_prompt_tokens


async def over_http(http: httpx.AsyncClient, client: Client, name: str) -> int:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {secret(name)}"})
    assert answer.status_code == 200, answer.text
    await client.wait_whole()
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("shape", [{"prefill": 1, "decode": 1}, {"prefill": 0, "decode": 0, "unified": 1}])
async def test_cached_tokens_are_of_the_own_group(tmp_path: Path, shape: dict[str, int]) -> None:
    keys, cache_key = tmp_path / "keys.yaml", tmp_path / "cache-key"
    keys.write_text(
        json.dumps({"keys": [{"name": n, "key": secret(n), "cache_group": group} for n, group in GROUPS.items()]})
    )
    cache_key.write_text("0123456789abcdef0123456789abcdef")
    spec = ClusterSpec(
        engine="sim",
        log_dir=tmp_path / "logs",
        router_set=(f"api_keys={keys}", f"secret={cache_key}", "prefill_policy=kv_aware"),
        worker_set=("limits.checks=[canary]", "limits.host_cache_gib=0.01"),
        **shape,
    )
    async with (
        LocalCluster(spec) as cluster,
        Client(cluster.grpc_address, cluster.admin_address) as client,
        httpx.AsyncClient(base_url=cluster.http_url, timeout=60) as http,
    ):
        assert await over_grpc(client, "a") == 0
        assert await over_http(http, client, "b") == 0, "a has sent this prompt, and that is nobody's business"
        assert await over_grpc(client, "c") == 0
        assert await over_grpc(client, "d") == await over_http(http, client, "c") == CACHED
        assert await over_http(http, client, "a") == await over_grpc(client, "b") == CACHED
