"""Tenants of one system learn nothing of each other and take nothing from each other, over HTTP and gRPC.

Anna sends what another tenant should not notice, Bert is that other tenant. Carl and Dora share a cache group. Eve has
a rate of one request.
"""

import asyncio
import contextlib
import io
import itertools
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from millrace.v1 import common_pb2, inference_pb2
from millrace_cli.cluster import ClusterSpec, LocalCluster
from millrace_common.reasons import Reason
from millrace_rpc.errors import from_rpc_error
from millrace_testing import HANG_S
from millrace_testing.client import Answer, Client, collect
from millrace_testing.inside_cluster import InsideCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGES, LONG, SIZE = 9, 5, 64  # of a device's pool, of a long prompt, and tokens of a page
HELD = 1 << 20  # bytes of bodies of one tenant
MARK = "quicksilver"  # in what Anna sends
TENANTS: dict[str, dict[str, Any]] = {
    "anna-mills": {},
    "bert-stone": {},
    "carl-field": {"cache_group": "shared"},
    "dora-brook": {"cache_group": "shared"},
    "eve-heath": {"requests_per_s": 0.001, "requests_burst": 2},
}
ANNA, BERT, CARL, DORA, EVE = TENANTS
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Lima"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def secret(name: str) -> str:
    return f"sk-{name}-0123456789-0123456789-0123456789"


def credentials(name: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {secret(name)}"),)


@dataclass(frozen=True, slots=True)
class House:
    cluster: LocalCluster
    client: Client
    http: httpx.AsyncClient
    told: dict[str, list[str]]  # what each tenant was answered over HTTP
    logged: io.StringIO

    async def post(self, who: str, path: str, body: dict[str, Any] | bytes, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        key = {"authorization": f"Bearer {secret(who)}", "content-type": "application/json"}
        answer = await self.http.post(path, content=content, headers={**key, **headers})
        self.told[who].append(f"{answer.headers} {answer.text}")
        return answer

    async def get(self, who: str, path: str, method: str = "GET") -> httpx.Response:
        answer = await self.http.request(method, path, headers={"authorization": f"Bearer {secret(who)}"})
        self.told[who].append(f"{answer.headers} {answer.text}")
        return answer

    def call(self, who: str, prompt: list[int] | str, **fields: Any) -> grpc.aio.UnaryStreamCall:
        wanted = {"text": prompt} if isinstance(prompt, str) else {"token_ids": {"ids": prompt}}
        sampling = {"temperature": 0.0, "max_tokens": 4, **fields.pop("sampling", {})}
        request = inference_pb2.GenerateRequest(prompt=wanted, sampling=sampling, **fields)
        return self.client.stub.Generate(request, metadata=credentials(who), timeout=HANG_S)

    async def ask(self, who: str, prompt: list[int] | str, **fields: Any) -> Answer:
        """Over gRPC."""
        answer = Answer()
        async for chunk in self.call(who, prompt, **fields):
            collect(answer, chunk)
        return answer

    async def cached(self, who: str, prompt: list[int]) -> tuple[int, int]:
        """Cached tokens of a prompt, by gRPC and then by HTTP. The second of them has sent it before."""
        by_grpc = (await self.ask(who, prompt, sampling={"ignore_eos": True})).usage.cached_prompt_tokens
        await self.client.wait_whole()
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = await self.post(who, "/v1/completions", body)
        assert answer.status_code == 200, answer.text
        await self.client.wait_whole()
        return by_grpc, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def works(self, who: str) -> None:
        """A short request of each API."""
        assert (await self.ask(who, [20, 21, 22], sampling={"ignore_eos": True})).finish == "length"
        answer = await self.post(who, "/v1/completions", {"model": "tiny", "prompt": "a fox", "max_tokens": 2})
        assert answer.status_code == 200, answer.text

    async def loads(self, what: str) -> int:
        workers = await self.client.wait_whole()
        return sum(load.counters[what] for worker in workers for load in worker.load.replicas)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    folder = tmp_path_factory.mktemp("tenants")
    keys, deployment = folder / "keys.yaml", folder / "secret"
    keys.write_text(json.dumps({"keys": [{"name": n, "key": secret(n), **rights} for n, rights in TENANTS.items()]}))
    deployment.write_text("0123456789abcdef0123456789abcdef")
    bodies = (f"limits.message_bytes={HELD}", f"bodies.held_by_tenant={HELD}", f"bodies.held={8 * HELD}")
    limits = (f"num_pages={PAGES + 1}", "max_prefill_tokens=512", "checks=[canary]", "max_model_len=1500")
    tiers = ("host_cache_gib=0.004", f"disk_cache={folder / 'pages'}", "disk_cache_gib=0.5")
    spec = ClusterSpec(
        router_set=(f"api_keys={keys}", f"secret={deployment}", "prefill_policy=kv_aware", *bodies),
        worker_set=tuple(f"limits.{item}" for item in (*limits, *tiers)),
    )
    async with (
        InsideCluster(spec) as cluster,
        Client(cluster.grpc_address, cluster.admin_address) as client,
        httpx.AsyncClient(base_url=cluster.http_url, timeout=HANG_S) as http,
    ):
        with logged() as lines:
            yield House(cluster, client, http, {name: [] for name in TENANTS}, lines)


@contextlib.contextmanager
def logged() -> Iterator[io.StringIO]:
    """What all processes would write at their usual level."""
    lines, root = io.StringIO(), logging.getLogger()
    handler, before = logging.StreamHandler(lines), root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield lines
    root.setLevel(before)
    root.removeHandler(handler)


def prompt_of(number: int) -> list[int]:
    return [10 + (number + i * i) % 900 for i in range(LONG * SIZE + 5)]


# ------------------------------------------------------------------------------------- caches


async def test_cached_pages_are_of_the_own_group_on_every_tier(house: House) -> None:
    """The pool has room for one prompt and a half, the host's memory for some: the pages move on to the disk."""
    whole = LONG * SIZE
    assert await house.cached(ANNA, prompt_of(1)) == (0, whole)
    assert await house.cached(BERT, prompt_of(1)) == (0, whole)
    assert await house.cached(CARL, prompt_of(1)) == (0, whole)
    assert await house.cached(DORA, prompt_of(1)) == (whole, whole)
    for tier, first, others in (("host_cached_tokens", 10, 3), ("disk_pages/load", 30, 6)):
        assert await house.cached(CARL, prompt_of(first)) == (0, whole)
        for who, known in ((BERT, 0), (DORA, whole)):
            for number in range(others):
                await house.ask(ANNA, prompt_of(first + number + 1))
            before = await house.loads(tier)
            assert (await house.cached(who, prompt_of(first)))[0] == known, (tier, who)
        assert await house.loads(tier) > before, "it came from there"


# ------------------------------------------------------------------------------------- shares


async def test_regexes_of_one_stop_no_structured_output_of_the_other(house: House) -> None:
    """Those of 62 KB are refused at once. Those within the limit take long to compile."""

    async def by_http(pattern: str) -> int | Reason:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "guided_regex": f"1{pattern}"}
        return await _outcome(house.post(ANNA, "/v1/completions", body))

    async def by_grpc(pattern: str) -> int | Reason:
        sampling = {"grammar": common_pb2.Grammar(regex=f"2{pattern}"), "max_tokens": 1}
        return await _outcome(house.ask(ANNA, "x", sampling=sampling))

    assert await by_http(".*" * 31_000) == 400 and await by_grpc(".*" * 31_000) is Reason.INVALID_ARGUMENT
    outcomes: set[int | Reason] = set()

    async def keep_sending(send: Callable[[str], Awaitable[int | Reason]]) -> None:
        while True:
            outcomes.add(await send(f"{next(numbers)}{'.*' * 1_000}"))

    numbers = itertools.count()
    senders = [asyncio.create_task(keep_sending(send)) for send in 3 * (by_http, by_grpc)]
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Where?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}},
    }
    answer = await house.post(BERT, "/v1/chat/completions", chat)
    grammar = common_pb2.Grammar(json_schema=json.dumps(SCHEMA | {"title": "another one"}))
    structured = await house.ask(BERT, "Where?", sampling={"grammar": grammar, "max_tokens": 60})
    assert not any(sender.done() for sender in senders)
    for sender in senders:
        sender.cancel()
    await asyncio.wait(senders)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["content"])["city"] in ("Oslo", "Lima")
    assert json.loads(structured.text)["city"] in ("Oslo", "Lima")
    assert outcomes <= {200, 400, Reason.INVALID_ARGUMENT}


async def _outcome(call: Any) -> int | Reason:
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return answer.status_code if isinstance(answer, httpx.Response) else 200


@contextlib.asynccontextmanager
async def held_body(house: House, who: str, size: int) -> AsyncIterator[None]:
    """A body of which the last byte never comes."""
    url = httpx.URL(house.cluster.http_url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    head = (
        "POST /v1/completions HTTP/1.1",
        "host: x",
        f"authorization: Bearer {secret(who)}",
        f"content-length: {size}",
    )
    writer.write("\r\n".join((*head, "", "")).encode() + b" " * (size - 1))
    await writer.drain()
    try:
        yield
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_bodies_that_one_holds_refuse_nobody_else(house: House) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a fox", "max_tokens": 2}).encode()
    padded = body + b" " * (HELD // 2)
    async with contextlib.AsyncExitStack() as stack:
        while (await house.post(ANNA, "/v1/completions", padded)).status_code != 429:
            await stack.enter_async_context(held_body(house, ANNA, HELD // 3))
        answer = await house.post(BERT, "/v1/completions", padded)
        assert answer.status_code == 200, answer.text
        await house.works(BERT)
    while (await house.post(ANNA, "/v1/completions", padded)).status_code == 429:
        await asyncio.sleep(0.02)


async def test_rates_are_of_one_tenant(house: House) -> None:
    await house.works(EVE)
    spent = await house.post(EVE, "/v1/completions", {"model": "tiny", "prompt": "a fox", "max_tokens": 2})
    assert spent.status_code == 429 and int(spent.headers["retry-after"]) > 60
    assert await _outcome(house.ask(EVE, [20, 21])) is Reason.RATE_LIMITED
    await house.works(BERT)


# ------------------------------------------------------------------------------------- answers


async def test_request_of_the_same_id_is_another_request(house: House) -> None:
    """Anna leaves hers in the middle, by either API; Bert's goes on."""
    endless = {"ignore_eos": True, "max_tokens": 60}
    alone = await house.ask(BERT, [30, 31, 32], sampling=endless)
    body = {"model": "tiny", "prompt": [30, 31, 32], "temperature": 0, **endless}
    named = {"x-request-id": "the-same", "authorization": f"Bearer {secret(ANNA)}"}
    his = house.call(BERT, [30, 31, 32], sampling=endless, request_id="the-same")
    his_http = asyncio.create_task(house.post(BERT, "/v1/completions", body, **{"x-request-id": "the-same"}))
    answer = Answer()
    collect(answer, await his.read())
    hers = house.call(ANNA, [30, 31, 33], sampling=endless, request_id="the-same")
    assert (await hers.read()).token_ids
    hers.cancel()
    async with house.http.stream("POST", "/v1/completions", json={**body, "stream": True}, headers=named) as stream:
        async for _ in stream.aiter_lines():
            break
    while chunk := await his.read():
        collect(answer, chunk)
    assert answer.tokens == alone.tokens and answer.finish == "length"
    whole = await his_http
    assert whole.status_code == 200 and whole.json()["choices"][0]["finish_reason"] == "length"
    assert whole.json()["choices"][0]["text"] == alone.text
    await house.client.wait_whole()


async def test_nothing_is_kept_that_another_could_read_or_cancel(house: House) -> None:
    body = {"model": "tiny", "input": f"keep {MARK}", "max_output_tokens": 4, "store": True}
    first = await house.post(ANNA, "/v1/responses", body)
    assert first.status_code == 200 and first.json()["store"] is False
    name = first.json()["id"]
    for who in (ANNA, BERT):
        again = await house.post(who, "/v1/responses", {**body, "previous_response_id": name})
        assert again.status_code == 400 and again.json()["error"]["param"] == "previous_response_id"
        for method, path in (
            ("GET", f"/v1/responses/{name}"),
            ("GET", f"/v1/responses/{name}/input_items"),
            ("DELETE", f"/v1/responses/{name}"),
            ("POST", f"/v1/responses/{name}/cancel"),
            ("GET", f"/explain/{name}"),
            ("GET", "/workers"),
            ("GET", "/metrics"),
        ):
            assert (await house.get(who, path, method)).status_code in (404, 405), path
    async with grpc.aio.insecure_channel(house.cluster.grpc_address) as channel:
        for method in ("Admin/ListWorkers", "Admin/ExplainRequest", "WorkerService/GetInfo"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/millrace.v1.{method}")(b"", metadata=credentials(BERT))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, method


async def test_all_see_the_same_models(house: House) -> None:
    first, second = [await house.get(who, "/v1/models") for who in (ANNA, BERT)]
    assert first.status_code == 200 and first.json() == second.json()
    ask = inference_pb2.ListModelsRequest()
    first, second = [await house.client.stub.ListModels(ask, metadata=credentials(who)) for who in (ANNA, BERT)]
    assert first == second


async def test_nobody_was_told_of_another(house: House) -> None:
    """What all tests above were answered, and what the logs have of them."""
    await house.post(ANNA, "/v1/completions", {"model": "tiny", "prompt": MARK, "max_tokens": 2})
    for who, texts in house.told.items():
        others = re.compile("|".join(name for name in TENANTS if name != who))
        assert texts and not [text[:300] for text in texts if others.search(text)], who
        assert who == ANNA or not [text[:300] for text in texts if MARK in text], who
    said = house.logged.getvalue()
    assert said and MARK not in said and not [name for name in TENANTS if secret(name) in said]
