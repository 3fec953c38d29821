"""Every field of every request: a wrong value is refused with the path that the client wrote, and with no other name.

The mistakes are made from the published description, so a new field is tested without a word here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
from millrace_router.apis import openapi
from millrace_router.apis.anthropic.http import POSTS
from millrace_router.apis.parsing import IGNORED, REFUSED
from millrace_rpc.errors import Path, spelled
from router.harness import Cluster

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
    count = 0
    for path, body in mistakes(DOCUMENT[REQUESTS[url]], (), lambda value: value):
        if not path or (path == ("input", 0, "type") and body["input"][0].get("type") is None):
            continue  # the body is no object, which test_encodings.py has; items without a type are messages
        answer = await pair.http.post(url, json=body)
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


LATE: dict[str, tuple[str, dict[str, Any], str]] = {  # found after parsing: (path, fields, field that is named)
    "chat's own name": ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
    "logprobs": ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "session": ("/v1/chat/completions", {"user": "x" * 513}, "user"),
    "stop": ("/v1/chat/completions", {"stop": "x" * 257}, "stop"),
    "stops": ("/v1/chat/completions", {"stop": ["x", ""]}, "stop[1]"),
    "long chat": ("/v1/chat/completions", {"max_tokens": 10**6}, "messages"),
    "role": ("/v1/chat/completions", {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    "long input": ("/v1/responses", {"max_output_tokens": 10**6}, "input"),
    "output": ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens"),
    "schema": (
        "/v1/responses", {"text": {"format": {"type": "json_schema", "schema": {"a": "x" * 70_000}}}}, "text.format",
    ),
    "stop sequence": ("/v1/messages", {"stop_sequences": ["x", ""]}, "stop_sequences[1]"),
    "user": ("/v1/messages", {"metadata": {"user_id": "x" * 513}}, "metadata.user_id"),
    "long message": ("/v1/messages", {"max_tokens": 10**6}, "messages"),
    "nested prompt": ("/v1/completions", {"prompt": [[1, -1]]}, "prompt[0][1]"),
    "prompt": ("/v1/completions", {"prompt": [1, -1]}, "prompt[1]"),
    "token": ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
}  # fmt: skip
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


@pytest.mark.parametrize("case", LATE)
async def test_a_late_mistake_has_the_name_of_its_api(case: str, pair: Cluster) -> None:
    url, fields, name = LATE[case]
    answer = await pair.http.post(url, json=RIGHT.get(url, {}) | fields)
    told = answer.json()["error"]
    assert answer.status_code == 400 and told["message"].startswith(f"{name} "), told
    assert told.get("param", name) == name


async def test_a_long_name_of_a_tool(serve: Callable) -> None:
    """Anthropic allows twice as many characters as OpenAI."""
    made, messages = await serve("v31"), [{"role": "user", "content": "hello"}]
    for size, accepted in ((64, (200, 200, 200)), (65, (400, 400, 200)), (128, (400, 400, 200)), (129, (400,) * 3)):
        name, schema = "a" * size, {"type": "object", "properties": {}}
        function = {"type": "function", "function": {"name": name}}
        bodies = (
            ("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "tools": [function]}),
            (
                "/v1/responses",
                {"input": "hello", "max_output_tokens": 2, "tools": [{"type": "function", "name": name}]},
            ),
            (
                "/v1/messages",
                {"messages": messages, "max_tokens": 2, "tools": [{"name": name, "input_schema": schema}]},
            ),
        )
        assert tuple([(await made.http.post(url, json=body)).status_code for url, body in bodies]) == accepted, size


HABITS: dict[str, dict[str, Any]] = {  # what clients attach
    "LiteLLM": {"cache_control": {"type": "ephemeral"}, "provider_specific_fields": {"a": 1}},
    "answers": {"refusal": None, "annotations": [], "audio": None, "function_call": None, "id": "x", "status": "done"},
    "openai's parsed answers": {"parsed": {"a": 1}},
    "DeepSeek's clients": {"prefix": False, "reasoning_content": None},
}


async def test_what_clients_attach_by_habit_changes_nothing(serve: Callable) -> None:
    made = await serve("v31")
    part, tool = {"type": "text", "text": "hello"}, {"type": "function", "function": {"name": "f"}}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for more in ({}, *HABITS.values()):
        cached = {name: value for name, value in more.items() if name.startswith(("cache", "provider"))}
        messages = [
            {"role": "user", "content": [part | cached]} | more,
            {"role": "assistant", "content": "", "tool_calls": [call | cached]} | more,
            {"role": "tool", "tool_call_id": "a", "content": "x"},
        ]
        tools = [tool | cached | {"function": {"name": "f", "strict": None, **cached}}]
        body = {"messages": messages, "tools": tools, "max_tokens": 2, **cached, "functions": [], "audio": None}
        assert (await made.http.post("/v1/chat/completions", json=body)).status_code == 200, more
    first, *others = (list(request.token_ids) for request in made.prefills[0].submitted)
    assert all(other == first for other in others)


@pytest.mark.parametrize("field", ["audio", "function_call", "partial", "prefix", "reasoning"])
async def test_what_would_change_the_answer_is_refused(field: str, pair: Cluster) -> None:
    turn = {"role": "assistant", "content": "x", field: {"a": 1}}
    answer = await pair.http.post("/v1/chat/completions", json={"messages": [turn]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == f"messages[0].{field}"
