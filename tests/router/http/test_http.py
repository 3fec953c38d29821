"""The public HTTP port as browsers, proxies and careless clients meet it: paths, origins, connections."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest.mock import AsyncMock

import grpc
import httpx
import pytest
from millrace.v1 import inference_pb2_grpc, worker_pb2
from millrace_common.reasons import Reason
from millrace_router.apis import public_http
from millrace_router.config import Connections
from millrace_rpc import http_connection
from millrace_rpc.errors import from_rpc_error
from router.fake_worker import DECODE, PREFILL, UNIFIED, FakeWorker, expected, output
from router.harness import SECOND_KEY, Cluster, bearer, becomes, request_of, write_keys

POSTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [64]},
}
GETS = ("/v1/models", "/v1/models/tiny", "/health", "/ready", "/metrics", "/openapi.json")
ORIGIN = "https://chat.example.com"


def spellings(path: str) -> list[str]:
    return [path, f"{path}/", f"{path}//", f"/{path}", path.replace("/", "//")]


async def test_further_slashes_in_a_path_change_nothing(pair: Cluster) -> None:
    for path in GETS:
        answers = [await pair.http.get(f"{pair.url}{spelling}") for spelling in spellings(path)]
        assert [answer.status_code for answer in answers] == [200] * 5, path
        if path != "/metrics":
            assert len({answer.text for answer in answers}) == 1
    for path, body in POSTS.items():
        for spelling in spellings(path):
            answer = await pair.http.post(f"{pair.url}{spelling}", json=body)
            assert answer.status_code == 200 and len(answer.headers["request-id"]) == 24, (spelling, answer.text)
    assert (await pair.http.get("/v1/models/")).json()["object"] == "list"


async def test_operators_paths_too(pair: Cluster) -> None:
    url = f"http://127.0.0.1:{pair.router.ports['admin_http']}"
    for spelling in spellings("/workers"):
        assert "workers" in (await pair.http.get(f"{url}{spelling}")).json()
    ask = POSTS["/v1/completions"]
    for name, written in (("a/b", "a/b"), ("a//b/", "a%2F%2Fb%2F")):
        await pair.http.post("/v1/completions", json=ask, headers={"x-request-id": name})
        answer = await pair.http.get(f"{url}/explain/{written}")
        assert answer.status_code == 200, answer.text


async def test_a_path_without_a_key_needs_none_however_it_is_written(cluster: Callable, tmp_path: Path) -> None:
    made: Cluster = await cluster(FakeWorker(UNIFIED), api_keys=write_keys(tmp_path))
    for path in ("/health/", "//health", "/ready//"):
        assert (await made.http.get(f"{made.url}{path}")).status_code == 200
    for path in ("/v1/models/", "/health/x", "/health/../v1/models"):
        answer = await made.http.send(made.http.build_request("GET", f"{made.url}{path}"))
        assert answer.status_code in (401, 404) and not answer.is_success


async def test_heads_and_options(pair: Cluster) -> None:
    for path in GETS:
        answer = await pair.http.head(path)
        assert answer.status_code == 200 and not answer.content and "content-length" in answer.headers, path
        answer = await pair.http.options(path)
        assert answer.status_code == 204 and set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}
    for path in POSTS:
        answer = await pair.http.options(path)
        assert answer.status_code == 204 and answer.headers["allow"] == "POST"


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE"])
async def test_a_method_that_is_not_there_has_the_vendors_shape(pair: Cluster, method: str) -> None:
    for path in POSTS:
        answer = await pair.http.request(method, path)
        assert answer.status_code == 405 and answer.headers["allow"] == "POST"
        name = answer.headers["x-request-id"]
        assert name == answer.headers["request-id"] == answer.json().get("request_id", name)
        assert kind_of(answer) == ("invalid_request_error", "method_not_supported"), path
    for path in ("/v1/nothing", "/v1/messages/nothing", "/"):
        answer = await pair.http.request(method, path, headers={"x-request-id": "mine"})
        assert answer.status_code == 404 and answer.headers["x-request-id"] == "mine"
        assert kind_of(answer) == ("not_found_error" if "messages" in path else "invalid_request_error", "not_found")


def kind_of(answer: httpx.Response) -> tuple[str, str]:
    """Type and code of an error. Anthropic's shape, which has no code, tells it by its type."""
    shown, error = answer.json(), answer.json()["error"]
    assert (shown.get("type") == "error") is answer.url.path.startswith("/v1/messages") and error["message"]
    return error["type"], error.get("code", "not_found" if answer.status_code == 404 else "method_not_supported")


async def test_the_ports_of_operators_tell_a_wrong_path_from_a_wrong_method(cluster: Callable) -> None:
    made: Cluster = await cluster(FakeWorker(UNIFIED), metrics="127.0.0.1:0")
    for port in ("admin_http", "metrics"):
        for path, kind in (("/nothing", "not_found"), ("/health", "method_not_supported")):
            answer = await made.http.delete(f"http://127.0.0.1:{made.router.ports[port]}{path}")
            assert kind_of(answer) == ("invalid_request_error", kind), port


async def test_idle_connections_stay_as_long_as_it_says_on_every_port(cluster: Callable) -> None:
    ports = ("http", "admin_http", "metrics")
    made: Cluster = await cluster(FakeWorker(UNIFIED), connections={"idle": 0.2}, metrics="127.0.0.1:0")
    for port in ports:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.ports[port])
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.read()).endswith(b'{"status":"ok"}'), "until it is closed"
        writer.close()
    assert Connections().idle == 75.0, "more than the 60 s of nginx and of cloud load balancers"
    made = await cluster(FakeWorker(UNIFIED), metrics="127.0.0.1:0")
    servers = (made.router._http, made.router._admin_http, made.router._probes)
    assert [server._config.timeout_keep_alive for server in servers] == [75.0] * 3


# ------------------------------------------------------------------------------------- other origins


def preflight(origin: str = ORIGIN) -> dict[str, str]:
    """As browsers send it for the vendors' clients."""
    headers = "anthropic-dangerous-direct-browser-access,anthropic-version,authorization,content-type,x-api-key"
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": f"{headers},x-session-id,x-stainless-lang",
    }


async def other_origins(cluster: Callable, tmp_path: Path, *origins: str) -> Cluster:
    keys = write_keys(tmp_path, None, {"requests_per_s": 0.01, "requests_burst": 1})
    settings = {"api_keys": keys, "connections": {"cors": origins}}
    return await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), **settings)


@pytest.mark.parametrize("allowed", [ORIGIN, "*"])
async def test_a_page_of_another_origin(cluster: Callable, tmp_path: Path, allowed: str) -> None:
    made = await other_origins(cluster, tmp_path, allowed)
    for path in (*POSTS, "/v1/models"):
        answer = await made.http.options(path, headers=preflight())
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] in (ORIGIN, "*")
        assert "POST" in answer.headers["access-control-allow-methods"]
        asked = preflight()["access-control-request-headers"].split(",")
        assert set(asked) <= set(answer.headers["access-control-allow-headers"].replace(" ", "").split(","))
    path = "/v1/chat/completions"
    key, limited = bearer() | {"origin": ORIGIN}, bearer(SECOND_KEY) | {"origin": ORIGIN}
    asked = (
        (200, await made.http.post(path, json=POSTS[path], headers=key)),
        (200, await made.http.post(path, json=POSTS[path] | {"stream": True}, headers=key)),
        (200, await made.http.post(path, json=POSTS[path], headers=limited)),
        (429, await made.http.post(path, json=POSTS[path], headers=limited)),
        (400, await made.http.post(path, content="{", headers=key)),
        (401, await made.http.post(path, json=POSTS[path], headers={"origin": ORIGIN})),
        (404, await made.http.get("/v1/nothing", headers=key)),
        (405, await made.http.put(path, headers=key)),
    )
    for status, answer in asked:
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] in (ORIGIN, "*")
        read = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "request-id", "retry-after"} <= set(read)


async def test_a_page_of_an_origin_that_is_not_named(cluster: Callable, tmp_path: Path, pair: Cluster) -> None:
    made = await other_origins(cluster, tmp_path, ORIGIN)
    answer = await made.http.options("/v1/models", headers=preflight("https://evil.example.com"))
    assert "access-control-allow-origin" not in answer.headers and answer.status_code == 400
    answer = await made.http.get("/health", headers={"origin": "https://evil.example.com"})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
    answer = await pair.http.options("/v1/models", headers=preflight())
    assert not any(name.startswith("access-control") for name in answer.headers), "off by default"


# ------------------------------------------------------------------------------------- clients that do not read


PROMPT = [10, 20, 30]


async def endless(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator[worker_pb2.SequenceOutput]:
    """As fast as it can, until it is aborted; with log-probabilities and large steps, to fill buffers soon."""
    first = request.num_prior_outputs
    while True:
        await asyncio.sleep(0)
        yield output(request, first, 20)
        first += 20


async def slow(cluster: Callable, unread: int = 200) -> Cluster:
    prefill, decode = FakeWorker(PREFILL), FakeWorker(DECODE)
    prefill.context = decode.context = 1 << 20
    decode.script.append(endless)
    return await cluster(prefill, decode, limits={"unread": unread})


async def test_a_grpc_client_that_does_not_read(cluster: Callable) -> None:
    """Its workers are freed, others are served meanwhile, and when it does read it gets what was kept and the error."""
    made = await slow(cluster)
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{made.router.ports['grpc']}", options=options) as ch:
        call = inference_pb2_grpc.InferenceStub(ch).Generate(request_of(PROMPT, 1 << 19, logprobs=20))
        first = await call.read()
        await made.until(lambda: bool(made.decodes[0].aborted))
        assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)
        got = list(first.token_ids)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while (response := await call.read()) is not grpc.aio.EOF:
                got += response.token_ids
        assert from_rpc_error(caught.value).reason is Reason.SLOW_CLIENT
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert got == expected(PROMPT, len(got)), "what it got has no hole"
    await made.quiet()
    assert made.metric("millrace_requests_total", api="grpc", status="slow_client") == 1


async def test_an_http_client_that_does_not_read(cluster: Callable) -> None:
    made = await slow(cluster)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1 << 19, "stream": True, "seed": 0, "logprobs": 5})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", made.router.ports["http"]))
        client.sendall((head + body).encode())
        await made.until(lambda: bool(made.decodes[0].aborted))
        assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)
        text = await asyncio.to_thread(_read_to, client, b'"code":"slow_client"')
        assert text.startswith(b"HTTP/1.1 200")
    await made.quiet()


def _read_to(client: socket.socket, mark: bytes) -> bytes:
    text = b""
    while mark not in text[-4096:]:
        piece = client.recv(1 << 16)
        assert piece, text[-200:]
        text += piece
    return text


async def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_fault(pair: Cluster) -> None:
    """What an app raises, its server logs as a fault."""
    app = public_http.build(pair.router.inference, None)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    send = AsyncMock()
    await app(scope, AsyncMock(return_value={"type": "http.disconnect"}), send)
    assert send.await_args_list[0].args[0]["status"] == 499
    assert pair.metric("millrace_requests_total", api="http", status="cancelled") == 1


async def test_a_request_that_is_begun_while_another_runs_does_not_end_it(
    cluster: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace_rpc.http_connection.MAX_HEAD_S", 0.05)
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE, step_s=0.05))
    body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", made.router.ports["http"])
    writer.write((head + body + "GET /health HTTP/1.1\r\n").encode())
    assert b"[DONE]" in await reader.read()
    writer.close()


# ------------------------------------------------------------------------------------- age


async def test_old_grpc_connections_end_in_good_order(cluster: Callable) -> None:
    """The client connects again by itself, to whichever router answers then; a running stream is not touched."""
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE, step_s=0.02), connections={"max_age": 0.3})
    call = made.stub.Generate(request_of(PROMPT, 50))
    said_goodbye = asyncio.create_task(becomes(made.public, grpc.ChannelConnectivity.IDLE))
    got: list[int] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        got += response.token_ids
    assert got == expected(PROMPT, 50), "1 s on a connection that may be 0.3 s old"
    await said_goodbye
    assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)


@pytest.mark.parametrize(("max_requests", "max_age"), [(3, None), (10_000, 0.2)])
async def test_old_http_connections_end_with_an_answer(
    cluster: Callable, monkeypatch: pytest.MonkeyPatch, max_requests: int, max_age: float | None
) -> None:
    monkeypatch.setattr(http_connection, "MAX_REQUESTS", max_requests)
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), connections={"max_age": max_age})
    async with httpx.AsyncClient(base_url=made.url, timeout=None) as client:
        closed = []
        while not any(closed):
            answer = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
            assert answer.status_code == 200
            closed.append(answer.headers.get("connection") == "close")
        assert len(closed) == 3 if max_age is None else len(closed) > 1
        assert (await client.get("/health")).status_code == 200


async def test_a_stream_interval_makes_fewer_messages_of_the_same_tokens(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE, step_s=0.002), stream_interval=0.1)
    result = await made.generate(PROMPT, sampling={"max_tokens": 60, "logprobs": 0})
    assert result.tokens() == expected(PROMPT, 60)
    for response in result.responses:
        assert [entry.sampled.token_id for entry in response.logprobs] == response.token_ids
    assert len(result.responses) < 30 and len(result.responses[0].token_ids) < 10, "the first one is not held back"
    await made.quiet()
