"""Every field of every request: a wrong value is refused with the path that the client wrote, in a short answer.

The mistakes are made from the published description, so a new field is tested without a word here.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import grpc
import httpx
import openai
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace.v1 import admin_pb2, inference_pb2, inference_pb2_grpc
from millrace_router.apis import openapi
from millrace_router.apis.anthropic.http import POSTS
from millrace_router.apis.parsing import IGNORED, REFUSED
from millrace_rpc.errors import Path, spelled
from router.harness import Cluster
from router.http.test_http import POSTS as WHOLE

DOCUMENT = openapi.document(POSTS)["components"]["schemas"]
REQUESTS = {path: post.request.__name__ for path, post in {**openapi.POSTS, **POSTS}.items()}
WRONG: dict[str, Any] = {
    "object": {}, "array": [], "string": "nonsense", "number": 12.5, "boolean": True, "integer": 7,
}  # fmt: skip
INTERNAL = re.compile(r"Input should|function-|\b(list|dict|str|int|bool|float|tag|validator|pydantic)\b(?!\])")
Schema = dict[str, Any]
Mistake = tuple[Path, Any]  # where, and the whole body


def branches(schema: Schema) -> list[Schema]:
    """The types that a value may have, without null."""
    if "$ref" in schema:
        return branches(DOCUMENT[schema["$ref"].rpartition("/")[2]])
    if several := schema.get("anyOf") or schema.get("oneOf"):
        return [inner for one in several for inner in branches(one)]
    return [] if schema.get("type") == "null" else [schema]


def sample(schema: Schema) -> Any:
    """The smallest right value."""
    first = branches(schema)[0]
    match first.get("type"):
        case "object":
            return {name: sample(first["properties"][name]) for name in first.get("required", ())}
        case "array":
            return [sample(first["items"])]
        case "string":
            return first.get("const") or first.get("enum", first.get("examples", ["x"]))[0]
    return {"boolean": True}.get(first.get("type", ""), 1)


def mistakes(schema: Schema, path: Path, put: Callable[[Any], Any]) -> Iterator[Mistake]:
    """`put`: the body with a value at this path."""
    about = schema.get("description", "")
    if about.startswith(IGNORED):
        return
    if about.startswith(REFUSED):
        yield path, put(True)
        return
    several = branches(schema)
    kinds = {one.get("type", "anything") for one in several}
    if kinds == {"anything"}:
        return
    kinds |= {"integer"} if "number" in kinds else set()
    yield from ((path, put(wrong)) for kind, wrong in WRONG.items() if kind not in kinds)
    if "string" in kinds and all("pattern" in one for one in several):
        yield from ((path, put(wrong)) for wrong in ("", "a b", "é", "x" * 200))
    if "string" in kinds and all("const" in one or "enum" in one for one in several if one["type"] == "string"):
        yield path, put("nonsense")
    if items := [one["items"] for one in several if one.get("type") == "array"]:
        of = {"anyOf": items}
        yield from mistakes(of, (*path, 0), lambda value: put([value]))
        yield (*path, 1), put([sample(of), None])
        yield (*path, 0), put([None])
    for one in several:
        if one.get("type") == "object":
            yield from in_object(one, path, put)


def in_object(schema: Schema, path: Path, put: Callable[[Any], Any]) -> Iterator[Mistake]:
    right, properties = sample(schema) if "properties" in schema else {}, schema.get("properties", {})
    if schema.get("additionalProperties") is False:
        yield (*path, "colour"), put(right | {"colour": 1})
    if isinstance(of := schema.get("additionalProperties"), dict):
        yield from mistakes(of, (*path, "5"), lambda value: put({"5": value}))
    for name in schema.get("required", ()):
        yield (*path, name), put({other: value for other, value in right.items() if other != name})
        yield (*path, name), put(right | {name: None})
    for name, of in properties.items():
        yield from mistakes(of, (*path, name), lambda value, name=name: put(right | {name: value}))


@pytest.mark.parametrize("url", REQUESTS)
async def test_a_mistake_is_named_by_its_path(url: str, pair: Cluster) -> None:
    count, http = 0, pair.direct
    for path, body in mistakes(DOCUMENT[REQUESTS[url]], (), lambda value: value):
        if not path or (path == ("input", 0, "type") and body["input"][0].get("type") is None):
            continue  # the body is no object, which edge/test_bodies.py has; items without a type are messages
        answer = await http.post(url, json=body)
        told, name = answer.json()["error"], spelled(path)
        assert answer.status_code == 400, (name, body, answer.text)
        assert told["message"].startswith(f"{name} "), (body, told)
        assert told.get("param", name) == name, (body, told)
        assert not INTERNAL.search(told["message"].removeprefix(name)), (body, told)
        count += 1
    assert count > 10, "the description has lost its fields"
    assert not any(worker.submitted for worker in pair.workers)


PARTS = [{"type": "text", "text": "hello"}, {"type": "text", "text": 5}]


async def test_clients_raise_their_own_error_with_the_path(pair: Cluster) -> None:
    messages = [{"role": "user", "content": PARTS}]
    async with openai.AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as chat:
            await client.chat.completions.create(model="tiny", messages=messages)
        assert chat.value.param == "messages[0].content[1].text" and "must be a string, not 5" in chat.value.message
        with pytest.raises(openai.BadRequestError) as responses:
            items = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "input_image"}]}]
            await client.responses.create(model="tiny", input=items)
        assert responses.value.param == "input[1].content[0].type"
    async with anthropic.AsyncAnthropic(base_url=pair.url, api_key="none", max_retries=0) as other:
        with pytest.raises(anthropic.BadRequestError) as told:
            await other.messages.create(model="tiny", max_tokens=1, messages=messages)
        assert told.value.body["error"]["message"] == "messages[0].content[1].text must be a string, not 5"
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].input_schema is required"):
            await other.messages.create(model="tiny", max_tokens=1, messages=messages[:0], tools=[{"name": "f"}])


async def test_a_long_name_of_a_tool(serve: Callable) -> None:
    """Anthropic allows twice as many characters as OpenAI."""
    made = await serve("v31")
    for size, accepted in ((64, [200, 200, 200]), (65, [400, 400, 200]), (128, [400, 400, 200]), (129, [400] * 3)):
        name = "a" * size
        tools = {
            "/v1/chat/completions": {"type": "function", "function": {"name": name}},
            "/v1/responses": {"type": "function", "name": name},
            "/v1/messages": {"name": name, "input_schema": {"type": "object"}},
        }
        answers = [await made.http.post(url, json=WHOLE[url] | {"tools": [tool]}) for url, tool in tools.items()]
        assert [answer.status_code for answer in answers] == accepted, size


# ------------------------------------------------------------------------------------- long inputs


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


async def refused(http: httpx.AsyncClient, url: str, content: bytes) -> int:
    """1: it was, and its answer is short."""
    answer = await http.post(url, content=content)
    if answer.is_success:
        return 0
    assert size(answer) <= MOST, (url, content[:300], answer.text[:300])
    return 1


@pytest.mark.parametrize("url", REQUESTS)
async def test_long_fields_over_http_come_back_cut(url: str, pair: Cluster) -> None:
    schema, http = DOCUMENT[REQUESTS[url]], pair.direct
    puts = list(places(schema, lambda value: value))
    count = 0
    for i, put in enumerate(puts):
        count += await refused(http, url, json.dumps(put(WORDS[i % len(WORDS)])).encode())
    assert count > len(puts) / 2, "most of it is refused"
    right = sample(schema)
    for text in TEXTS:
        for strange in ({text: 1}, {**right, text: 1}, {**right, "model": text}, {"a": {text: 1}}, text, [text]):
            assert await refused(http, url, json.dumps(strange).encode())
        assert await refused(http, url, text.encode()) and await refused(http, url, b'{"a": ' + text.encode())
    deep = b'{"' + b'x": {"' * 500 + b'\\ud800": 1' + b"}" * 501
    wide = b'{"a": {"' + b"x" * SIZE + b'": "\\ud800"}}'
    for strange in (deep, wide, b"[" * SIZE, b'{"n": ' + b"9" * SIZE + b"}"):
        assert await refused(http, url, strange)


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


async def test_long_parts_of_schemas_come_back_cut(pair: Cluster) -> None:
    chat, text, http = "/v1/chat/completions", [{"role": "user", "content": "a"}], pair.direct
    count = 0
    for make in SCHEMAS:
        for long in ("x" * 20_000, "é/~%" * 5_000):
            schema = make(long)
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
            tool = {"type": "function", "function": {"name": "a", "parameters": schema, "strict": True}}
            for more in ({"response_format": form}, {"tools": [tool], "tool_choice": "required"}):
                count += await refused(http, chat, json.dumps({"messages": text, **more}).encode())
    assert count > len(SCHEMAS)


OTHERS = ("content-encoding", "content-type", "host", "origin", "authorization", "x-api-key")


async def test_long_paths_and_headers_come_back_cut(pair: Cluster) -> None:
    admin = f"http://127.0.0.1:{pair.router.ports['admin_http']}"
    text = "x" * HEADER
    short = {"content-type": "application/json"}
    asked = [
        ("POST", f"{at}{path}", {**short, name: text})
        for at, paths in (("", (*REQUESTS, "/v1/models")), (admin, ("/warmup", "/drain/x", "/start_profile")))
        for i, path in enumerate(paths)
        for name in ("x-request-id", *(OTHERS if i % 3 == 0 else ()))
    ]
    long = "x" * 50_000
    asked += [
        (method, f"{at}/{path}{long}", short)
        for at in ("", admin)
        for path in ("", "v1/", "v1/messages/", "v1/models/", "drain/", "explain/")
        for method in ("GET", "POST")
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


async def test_long_fields_over_grpc_come_back_cut(pair: Cluster) -> None:
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
                count += await refused_call(getattr(stub(channel), method)(completed(request)))
        for method, kind in names.items():
            for request in filled(kind, text):
                assert await refused_call(getattr(pair.admin, method)(request)), method
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
