"""Whatever a client sends comes back in errors in part only: no answer to a mistake has more than 2 KB."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace.v1 import admin_pb2, inference_pb2, inference_pb2_grpc
from router.harness import Cluster
from router.openai.test_fields import DOCUMENT, REQUESTS, Schema, branches, sample

SIZE = 100_000
MOST = 2_000  # bytes of an error, and of its headers
HEADER = 7_000  # characters: of all headers 8 KiB are allowed
TEXTS = ["x" * SIZE, '\n\0"\\' * (SIZE // 20), "é☃🙂" * (SIZE // 15)]
WORDS = [*TEXTS, {TEXTS[0]: TEXTS[0]}, [TEXTS[1]], int("9" * 4000)]


Put = Callable[[Any], Any]


def places(schema: Schema, put: Put) -> Iterator[Put]:
    """For every field, and an item of every array: the smallest request with a value there. `put`: for the schema."""
    for one in branches(schema):
        if one.get("type") == "object":
            right = sample(one) if "properties" in one else {}
            for name, inner in one.get("properties", {}).items():
                yield (at := lambda value, name=name, right=right: put({**right, name: value}))
                yield from places(inner, at)
        elif one.get("type") == "array":
            yield (at := lambda value: put([value]))
            yield from places(one["items"], at)


def size(answer: httpx.Response) -> int:
    """Bytes, with the headers."""
    return len(answer.content) + sum(len(name) + len(value) for name, value in answer.headers.raw)


async def refused(pair: Cluster, url: str, content: bytes) -> int:
    """1: it was, and its answer is short."""
    answer = await pair.http.post(url, content=content)
    if answer.is_success:
        return 0
    assert size(answer) <= MOST, (url, content[:300], answer.text[:300])
    return 1


@pytest.mark.parametrize("url", REQUESTS)
async def test_fields_over_http(url: str, pair: Cluster) -> None:
    schema = DOCUMENT[REQUESTS[url]]
    puts = list(places(schema, lambda value: value))
    count = 0
    for i, put in enumerate(puts):
        count += await refused(pair, url, json.dumps(put(WORDS[i % len(WORDS)])).encode())
    assert count > len(puts) / 2, "most of it is refused"
    right = sample(schema)
    for text in TEXTS:
        for strange in ({text: 1}, {**right, text: 1}, {**right, "model": text}, {"a": {text: 1}}, text, [text]):
            assert await refused(pair, url, json.dumps(strange).encode())
        assert await refused(pair, url, text.encode()) and await refused(pair, url, b'{"a": ' + text.encode())
    deep = b'{"' + b'x": {"' * 500 + b'\\ud800": 1' + b"}" * 501
    wide = b'{"a": {"' + b"x" * SIZE + b'": "\\ud800"}}'
    for strange in (deep, wide, b"[" * SIZE, b'{"n": ' + b"9" * SIZE + b"}"):
        assert await refused(pair, url, strange)


SCHEMAS = [
    lambda text: {"$ref": f"#/{text}"},
    lambda text: {"$ref": text},
    lambda text: {"$schema": text},
    lambda text: {"type": text},
    lambda text: {"format": text},
    lambda text: {"pattern": text},
    lambda text: {"pattern": f"a{{{text}"},
    lambda text: {"pattern": f"a{{{'9' * 4000}}}"},
    lambda text: {"required": text},
    lambda text: {"required": [1], "title": text},
    lambda text: {text: 1, "not": {}},
    lambda text: {"properties": {text: {"type": "nonsense"}}},
    lambda text: {"properties": {text: {"uniqueItems": True}}},
    lambda text: {"$defs": {text: {"uniqueItems": True}}, "$ref": f"#/$defs/{text}"},
    lambda text: {"enum": [text], "type": "integer"},
    lambda text: {"const": text, "maxLength": 3},
    lambda text: {"minimum": int("9" * 4000)},
    lambda text: {"patternProperties": {text: 1}},
    lambda text: {"dependentRequired": {text: 1}},
]  # fmt: skip


async def test_schemas(pair: Cluster) -> None:
    chat, text = "/v1/chat/completions", [{"role": "user", "content": "a"}]
    count = 0
    for make in SCHEMAS:
        for long in ("x" * 20_000, "é/~%" * 5_000):
            schema = make(long)
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
            tool = {"type": "function", "function": {"name": "a", "parameters": schema, "strict": True}}
            for more in ({"response_format": form}, {"tools": [tool], "tool_choice": "required"}):
                count += await refused(pair, chat, json.dumps({"messages": text, **more}).encode())
    assert count > len(SCHEMAS)


async def test_paths_and_headers(pair: Cluster) -> None:
    admin = f"http://127.0.0.1:{pair.router.ports['admin_http']}"
    text = "x" * HEADER
    short = {"content-type": "application/json"}
    asked = [
        ("POST", f"{at}{path}", {**short, name: text})
        for at, paths in (("", (*REQUESTS, "/v1/models")), (admin, ("/warmup", "/drain/x", "/start_profile")))
        for path in paths
        for name in ("x-request-id", "content-encoding", "content-type", "host", "origin", "authorization", "x-api-key")
    ]
    long = "x" * 50_000
    asked += [
        (method, f"{at}/{path}{long}", short)
        for at in ("", admin)
        for path in ("", "v1/", "v1/messages/", "v1/models/", "drain/", "explain/")
        for method in ("GET", "POST", "PUT")
    ]
    asked += [("POST", "/v1/messages", {**short, "x-request-id": text}), ("GET", "/v1/models/x?" + long, short)]
    count = 0
    for method, url, headers in asked:
        answer = await pair.http.request(method, url, headers=headers, content=b"{")
        assert size(answer) <= MOST, (method, url[:99], headers, answer.text[:300])
        count += answer.is_error
    assert count > len(asked) * 0.9


def filled(kind: type[Message], text: str, deep: int = 3) -> Iterator[Message]:
    """Messages with one text each, at every place that takes one."""
    for field in kind.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.type == FieldDescriptor.TYPE_STRING:
            yield kind(**{field.name: [text] if field.is_repeated else text})
        elif field.message_type is not None and deep:
            for inner in filled(field.message_type._concrete_class, text, deep - 1):
                yield kind(**{field.name: [inner] if field.is_repeated else inner})


def completed(request: Message) -> Message:
    """With a right prompt, if the request has none."""
    if isinstance(request, inference_pb2.GenerateRequest) and not request.HasField("prompt"):
        request.prompt.token_ids.ids.append(1)
    return request


async def test_fields_over_grpc(pair: Cluster) -> None:
    calls = [
        (inference_pb2_grpc.InferenceStub, pair.public, "Generate", inference_pb2.GenerateRequest),
        (inference_pb2_grpc.InferenceStub, pair.public, "Tokenize", inference_pb2.TokenizeRequest),
        (inference_pb2_grpc.InferenceStub, pair.public, "Detokenize", inference_pb2.DetokenizeRequest),
        (health_pb2_grpc.HealthStub, pair.public, "Check", health_pb2.HealthCheckRequest),
    ]
    names = {"DrainWorker": admin_pb2.DrainWorkerRequest, "ExplainRequest": admin_pb2.ExplainRequestRequest}
    names |= {"StartProfiles": admin_pb2.StartProfilesRequest, "StopProfiles": admin_pb2.StopProfilesRequest}
    count = 0
    for text in TEXTS:
        for stub, channel, method, kind in calls:
            for request in filled(kind, text):
                count += await refused_call(getattr(stub(channel), method)(completed(request), timeout=20))
        for method, kind in names.items():
            for request in filled(kind, text):
                assert await refused_call(getattr(pair.admin, method)(request, timeout=20)), method
    assert count > 10


async def refused_call(call: Any) -> int:
    try:
        async for _ in call if hasattr(call, "__aiter__") else _once(call):
            pass
    except grpc.aio.AioRpcError as error:
        size = sum(len(key) + len(value) for key, value in error.trailing_metadata())
        assert size <= MOST and len(error.details().encode()) <= MOST / 2, error.details()[:300]
        assert error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED, "the client could not take the headers"
        return 1
    return 0


async def _once(call: Any) -> Any:
    yield await call
