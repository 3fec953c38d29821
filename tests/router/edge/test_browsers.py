"""The public HTTP port as browsers, proxies and careless clients meet it: paths, methods, and other origins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from millrace_router.config import Connections
from pydantic import ValidationError
from router.fake_worker import DECODE, PREFILL, UNIFIED, FakeWorker
from router.harness import Cluster

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
            assert answer.status_code == 200, (spelling, answer.text)
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
    (tmp_path / "keys").write_text(json.dumps({"keys": [{"name": "one", "key": "sk-first-secret-1-0123456789abcdef"}]}))
    made: Cluster = await cluster(FakeWorker(UNIFIED), api_keys=str(tmp_path / "keys"))
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
        shown = answer.json()
        assert shown.get("type") == "error" if path.startswith("/v1/messages") else shown["error"]["message"]
        name = answer.headers["x-request-id"]
        assert name == answer.headers["request-id"] == shown.get("request_id", name)
    for path in ("/v1/nothing", "/v1/messages/nothing", "/"):
        answer = await pair.http.request(method, path, headers={"x-request-id": "mine"})
        assert answer.status_code == 404 and answer.headers["x-request-id"] == "mine"
        assert answer.json().get("type") == "error" if "messages" in path else answer.json()["error"]["code"]


async def test_openais_client_with_a_slash_too_many(pair: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{pair.url}//v1//", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], n=1)
        assert answer.choices


async def test_idle_connections_stay_as_long_as_it_says_on_every_port(cluster: Callable) -> None:
    ports = ("http", "admin_http", "metrics")
    made: Cluster = await cluster(FakeWorker(UNIFIED), connections={"idle": 0.2}, metrics="127.0.0.1:0")
    for port in ports:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.ports[port])
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 120)).endswith(b'{"status":"ok"}'), "until it is closed"
        writer.close()
    assert Connections().idle == 75.0, "more than the 60 s of nginx and of cloud load balancers"
    made = await cluster(FakeWorker(UNIFIED), metrics="127.0.0.1:0")
    servers = (made.router._http, made.router._admin_http, made.router._probes)
    assert [server._config.timeout_keep_alive for server in servers] == [75.0] * 3


async def test_a_stream_for_an_old_client(pair: Cluster) -> None:
    body = json.dumps(POSTS["/v1/chat/completions"] | {"stream": True, "max_tokens": 20})
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.router.ports["http"])
    writer.write(f"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    head, _, events = (await asyncio.wait_for(reader.read(), 120)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and events.endswith(b"data: [DONE]\n\n")
    assert all(event.startswith(b"data: ") for event in events.removesuffix(b"\n\n").split(b"\n\n"))
    writer.close()


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
    keys = [
        {"name": "one", "key": "sk-first-secret-1-0123456789abcdef"},
        {"name": "two", "key": "sk-second-secret-2-0123456789abcdef", "requests_per_s": 0.01, "requests_burst": 1},
    ]
    (tmp_path / "keys").write_text(json.dumps({"keys": keys}))
    settings = {"api_keys": str(tmp_path / "keys"), "connections": {"cors": origins}}
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
    key = {"authorization": "Bearer sk-first-secret-1-0123456789abcdef", "origin": ORIGIN}
    limited = {"authorization": "Bearer sk-second-secret-2-0123456789abcdef", "origin": ORIGIN}
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


@pytest.mark.parametrize("origin", ["chat.example.com", "https://chat.example.com/", "https://*.example.com", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match="is no origin"):
        Connections(cors=(origin,))
