"""The public ports of a router: keys, limits, certificates, and headers that are nobody's business."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import Callable
from pathlib import Path

import anthropic
import grpc
import httpx
import pytest
from millrace.v1 import inference_pb2, inference_pb2_grpc
from millrace_common.reasons import Reason
from millrace_common.tls_config import Tls
from millrace_router.http.answers import on_error
from millrace_router.http.guard import MAX_HEADER_BYTES, HttpGuard
from millrace_rpc.client import channel
from millrace_rpc.errors import MillraceError, from_rpc_error
from millrace_rpc.tls import Identity
from millrace_testing import HANG_S
from millrace_testing.certificates import Authority
from router.fake_worker import DECODE, PREFILL, UNIFIED, FakeWorker, expected
from router.harness import FIRST_KEY, SECOND_KEY, Cluster, bearer, write_keys
from starlette.requests import Request

BODY = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "seed": 0}


async def tokens(stub: inference_pb2_grpc.InferenceStub, key: str, **fields: object) -> list[int] | Reason:
    request = inference_pb2.GenerateRequest(
        prompt={"token_ids": {"ids": [1, 2, 3]}}, sampling={"max_tokens": 4, "seed": 0}, **fields
    )
    try:
        call = stub.Generate(request, metadata=tuple(bearer(key).items()), timeout=HANG_S)
        return [token async for response in call for token in response.token_ids]
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason


@pytest.fixture
async def keyed(cluster: Callable, tmp_path: Path) -> Cluster:
    keys = write_keys(tmp_path, {"priority": 2}, {"requests_per_s": 0.01, "requests_burst": 2})
    return await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), api_keys=keys, metrics="127.0.0.1:0")


async def test_a_key_is_needed_for_everything_but_probes(keyed: Cluster) -> None:
    assert await tokens(keyed.stub, FIRST_KEY) == expected([1, 2, 3], 4)
    assert await tokens(keyed.stub, "sk-nobody") is Reason.UNAUTHENTICATED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await keyed.stub.ListModels(inference_pb2.ListModelsRequest())
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    for path in ("/health", "/ready"):
        assert (await keyed.http.get(path)).status_code == 200
    for path in ("/v1/models", "/metrics"):
        answer = await keyed.http.get(path)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "authentication_error"
    assert (await keyed.http.get("/v1/models", headers=bearer(FIRST_KEY))).status_code == 200
    assert (await keyed.http.get("/metrics", headers=bearer(FIRST_KEY))).status_code == 404, "they tell of all tenants"
    answer = await keyed.http.post("/v1/completions", json=BODY, headers=bearer(FIRST_KEY))
    assert answer.status_code == 200
    assert keyed.metric("millrace_tenant_requests_total", tenant="one", status="ok") == 2
    assert keyed.metric("millrace_tenant_tokens_total", tenant="one", direction="output") == 8


async def test_the_header_of_anthropics_clients(keyed: Cluster) -> None:
    question = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    async with anthropic.AsyncAnthropic(base_url=keyed.url, api_key=FIRST_KEY, max_retries=0) as client:
        assert (await client.messages.count_tokens(**question)).input_tokens > 0
    async with anthropic.AsyncAnthropic(base_url=keyed.url, api_key="sk-nobody", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await client.messages.count_tokens(**question)


async def test_a_tenant_that_is_gone_leaves_no_series(keyed: Cluster, tmp_path: Path) -> None:
    for key in (FIRST_KEY, SECOND_KEY):
        assert await tokens(keyed.stub, key) == expected([1, 2, 3], 4)
    probe = f"http://127.0.0.1:{keyed.router.ports['metrics']}/metrics"
    series = (await keyed.http.get(probe)).text
    assert 'tenant="one"' in series and 'tenant="two"' in series
    (tmp_path / "keys").write_text(json.dumps({"keys": [{"name": "two", "key": SECOND_KEY}]}))
    while 'tenant="one"' in (series := (await keyed.http.get(probe)).text):
        await asyncio.sleep(0.1)
    assert 'tenant="two"' in series
    assert keyed.metric("millrace_tenant_tokens_total", tenant="two", direction="output") == 4


@pytest.mark.parametrize(("after_s", "header"), [(0.0, None), (0.1, "1"), (1.0, "1"), (1.2, "2"), (59.4, "60")])
async def test_retry_after_is_whole_seconds_and_never_too_soon(after_s: float, header: str | None) -> None:
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "query_string": b"", "headers": []}
    error = MillraceError(Reason.QUEUE_FULL, "x", retry_after_s=after_s)
    answer = await on_error(Request({**scope, "server": ("x", 1), "scheme": "http"}), error)
    assert answer.status_code == 429 and answer.headers.get("retry-after") == header


async def test_a_key_caps_the_priority(keyed: Cluster) -> None:
    await tokens(keyed.stub, FIRST_KEY, priority=50)
    assert [worker.submitted[-1].priority for worker in keyed.workers] == [2, 2]


async def test_headers_of_ours_do_not_come_from_clients() -> None:
    seen = {}

    async def app(scope: dict, receive: object, send: object) -> None:
        seen.update(scope)

    headers = [(b"x-millrace-decode", b"1.2.3.4:5"), (b"x-request-id", b"r"), (b"x-millrace-tenant", b"root")]
    await HttpGuard(app, None)({"type": "http", "path": "/", "headers": headers}, None, None)
    assert seen["headers"] == [(b"x-request-id", b"r")]


async def test_headers_are_bounded(cluster: Callable) -> None:
    made: Cluster = await cluster(FakeWorker(UNIFIED))
    answer = await made.http.get("/v1/models", headers={"x-much": "a" * MAX_HEADER_BYTES})
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "message_too_large"
    many = {f"x-many-{i}": "a" * 100 for i in range(MAX_HEADER_BYTES // 100)}
    assert (await made.http.get("/v1/models", headers=many)).status_code == 413
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await made.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=(("x-much", "a" * 100_000),))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await made.http.get("/v1/models")).status_code == 200


async def test_a_deadline_shorter_than_the_queue_is_refused_at_once(cluster: Callable) -> None:
    made: Cluster = await cluster(FakeWorker(UNIFIED, capacity=0))
    running = [asyncio.create_task(made.generate([1, 2, 3])) for _ in range(2)]
    await made.until(lambda: len(made.router.admission) == 2)
    rate = made.router.admission._rate
    rate._tokens, rate._seconds, rate._longest = 6.0, HANG_S + 55, 3  # of the prompt tokens that wait
    result = await made.generate([1, 2, 3])
    error = from_rpc_error(result.error)
    assert error.reason is Reason.DEADLINE_TOO_SHORT and 50 <= error.retry_after_s <= 60
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_new_certificates_are_shown_on_both_ports(cluster: Callable, tmp_path: Path) -> None:
    """Of the files that the router shows its clients."""
    settings = Authority().tls(tmp_path / "router")
    made: Cluster = await cluster(FakeWorker(UNIFIED), public_tls=settings)
    address = f"127.0.0.1:{made.router.ports['grpc']}"
    async with channel(address, Identity(Tls(ca=settings["ca"]))) as first:
        assert await tokens(inference_pb2_grpc.InferenceStub(first), "") == expected([1, 2, 3], 4)
    new = Authority().tls(tmp_path / "router")
    await _until_loaded(made, new["ca"])
    async with channel(address, Identity(Tls(ca=new["ca"]))) as second:
        assert await tokens(inference_pb2_grpc.InferenceStub(second), "") == expected([1, 2, 3], 4)


async def _until_loaded(made: Cluster, ca: object) -> None:
    """Until the files were loaded again, which handshakes make happen, and HTTPS shows them."""
    context = ssl.create_default_context(cafile=str(ca))
    while not made.metric("millrace_reloads_total", what="certificates", outcome="ok"):
        with contextlib.suppress(httpx.ConnectError):
            async with httpx.AsyncClient(verify=context, timeout=None) as client:
                await client.get(f"https://127.0.0.1:{made.router.ports['http']}/health")
        await asyncio.sleep(0.05)
    async with httpx.AsyncClient(verify=context, timeout=None) as client:
        await client.get(f"https://127.0.0.1:{made.router.ports['http']}/health")


async def test_probes_have_a_plain_port_of_their_own(cluster: Callable, tmp_path: Path) -> None:
    settings = Authority().tls(tmp_path, require_client_cert=True)
    made: Cluster = await cluster(FakeWorker(UNIFIED), public_tls=settings, metrics="127.0.0.1:0")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{made.router.ports['metrics']}", timeout=None) as probe:
        assert (await probe.get("/ready")).status_code == 200
        said = (await probe.get("/metrics")).text
        gauges = ("millrace_queue_tokens 0.0", "millrace_queue_wait_seconds 0.0", "millrace_retry_budget_attempts 50.0")
        assert all(f"\n{gauge}\n" in said for gauge in gauges)
        assert (await probe.get("/v1/models")).status_code == 404


OTHERS = {  # requests that need no worker: over HTTP a path and a body, over gRPC a method and a message
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [65, 66]},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
    "Tokenize": inference_pb2.TokenizeRequest(prompt={"text": "abc"}),
    "Detokenize": inference_pb2.DetokenizeRequest(token_ids=[65, 66]),
}
WITH_A_MISTAKE: dict[str, object] = {  # bytes: of a message that cannot be read, or has too many
    "/v1/completions": {"prompt": 7},
    "/tokenize": {},
    "Generate": inference_pb2.GenerateRequest(),
    "Tokenize": inference_pb2.TokenizeRequest(),
    "Detokenize": inference_pb2.DetokenizeRequest(token_ids=[1 << 30]),
    "Generate garbage": b"\xff",
    "Tokenize too much": b"a" * ((8 << 20) + 1),
}


async def outcome(keyed: Cluster, name: str, message: object) -> object:
    """An HTTP status, or a reason."""
    if name.startswith("/"):
        return (await keyed.http.post(name, json=message, headers=bearer(SECOND_KEY))).status_code
    method, metadata = name.partition(" ")[0], tuple(bearer(SECOND_KEY).items())
    kind = keyed.public.unary_stream if method == "Generate" else keyed.public.unary_unary
    data = message if isinstance(message, bytes) else message.SerializeToString()
    call = kind(f"/millrace.v1.Inference/{method}")(data, metadata=metadata, timeout=HANG_S)
    try:
        return await (call.read() if method == "Generate" else call)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason


@pytest.mark.parametrize(
    ("name", "message"),
    [*OTHERS.items(), *WITH_A_MISTAKE.items()],
    ids=[*OTHERS, *(f"mistaken {name}" for name in WITH_A_MISTAKE)],
)
async def test_what_needs_no_worker_counts_for_the_rate_of_requests(keyed: Cluster, name: str, message: object) -> None:
    """Two are allowed. The third is refused before it is read."""
    limited = (429, Reason.RATE_LIMITED)
    assert await outcome(keyed, name, message) not in limited
    assert await outcome(keyed, name, message) not in limited
    assert await outcome(keyed, name, message) in limited
    assert await outcome(keyed, "/v1/completions", {"prompt": 7}) == 429, "what is wrong is not looked for"
    assert await tokens(keyed.stub, FIRST_KEY) == expected([1, 2, 3], 4)
