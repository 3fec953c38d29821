"""/v1/responses as the openai client sees it."""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from millrace.v1 import common_pb2
from millrace_router.text import markers
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import BaseModel
from router.apis.openai.test_openai import text_of
from router.apis.openai.test_openai_tools import client_of
from router.fake_worker import fails, hangs
from router.harness import Cluster
from router.scripted import SCHEMA, grammar_of, prompt_of, say
from router.text.test_parsers import WEATHER, v31, v32

TOOLS = [
    {"type": "function", "name": "weather", "description": "Of a city", "parameters": SCHEMA, "strict": False},
    {"type": "function", "name": "time"},
]
HIGH = {"effort": "high"}
LENGTH = common_pb2.FINISH_REASON_LENGTH
LIFE = {"response.created", "response.in_progress", "response.completed", "response.incomplete"}


async def both(made: Cluster, says: str, finish: int = common_pb2.FINISH_REASON_STOP, **fields: Any) -> Response:
    """The answer, which is the same at once and streamed."""
    fields = {"model": "tiny", "input": "Weather?"} | fields
    async with client_of(made) as client:
        say(made, says, finish)
        whole = await client.responses.create(**fields)
        Response.model_validate(whole.model_dump(), strict=True)
        say(made, says, finish)
        events = [event async for event in await client.responses.create(**fields, stream=True)]
        say(made, says, finish)
        async with client.responses.stream(**fields) as stream:  # the client puts it together
            async for _ in stream:
                pass
    for event in events:
        type(event).model_validate(event.model_dump(), strict=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    told = events[-1].response
    assert events[-1].type == f"response.{whole.status}" and as_sent(told.output) == as_sent(whole.output)
    assert told.usage == whole.usage and told.id == events[0].response.id
    assert put_together([event for event in events if event.type not in LIFE]) == [
        as_json(item) for item in told.output
    ]
    await made.quiet()
    return whole


def put_together(events: list[Any]) -> list[dict[str, Any]]:
    """The items that are done. Parts and pieces of each add up to it, and one item is told of at a time."""
    items: list[dict[str, Any]] = []
    text, part = "", None
    for event in events:
        kind = event.type
        if kind == "response.output_item.added":
            assert event.output_index == len(items) and event.item.status == "in_progress"
            assert not getattr(event.item, "content", None) and not getattr(event.item, "arguments", "")
            text, part = "", None
            continue
        if kind == "response.output_item.done":
            items.append(as_json(event.item))
            pieces = [part] if part is not None else [{"arguments": text}]
            assert items[-1].get("content", [{"arguments": items[-1].get("arguments")}]) == pieces
        elif kind == "response.content_part.done":
            part = as_json(event.part)
            assert part["text"] == text
        elif kind.endswith(".delta"):
            text += event.delta
        elif kind.endswith(".done"):
            assert text == (event.arguments if kind == "response.function_call_arguments.done" else event.text)
        else:
            assert kind == "response.content_part.added" and event.part.text == ""
        assert event.output_index == len(items) - (kind == "response.output_item.done")
    return items


def as_json(item: BaseModel) -> dict[str, Any]:
    return item.model_dump(exclude_none=True)


def as_sent(items: list[Any]) -> list[dict[str, Any]]:
    """Without what is drawn for each answer."""
    return [item.model_dump(exclude={"id", "call_id"}, exclude_none=True) for item in items]


async def test_a_text_has_its_usage_and_status(pair: Cluster) -> None:
    async with client_of(pair) as client:
        answer = await client.responses.create(
            model="tiny", input="hello", instructions="Be brief.", max_output_tokens=8, extra_body={"seed": 0}
        )
    assert answer.output_text == text_of(pair) and answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens" and answer.output[0].status == "incomplete"
    assert answer.usage.input_tokens == len(pair.prefills[0].submitted[0].token_ids)
    assert answer.usage.output_tokens == 8 and answer.usage.total_tokens == answer.usage.input_tokens + 8
    assert prompt_of(pair).index("Be brief.") < prompt_of(pair).index("hello")
    assert answer.model_dump()["store"] is False, "although it was not asked for"
    await pair.quiet()


async def test_calls_are_items_by_choice_of_the_client(serve: Callable) -> None:
    made = await serve("v31")
    said = await both(made, "I look." + v31(("weather", WEATHER), ("time", "{}")), tools=TOOLS)
    text, weather, time = said.output
    assert text.content[0].text == "I look." and said.status == "completed"
    assert (weather.name, weather.arguments, time.name, time.arguments) == ("weather", WEATHER, "time", "{}")
    assert weather.call_id != time.call_id and weather.id != time.id and grammar_of(made) is None
    said = await both(made, v31(("weather", WEATHER), ("time", "{}")), tools=TOOLS, parallel_tool_calls=False)
    assert [item.name for item in said.output] == ["weather"]
    for choice in ("required", {"type": "function", "name": "time"}):
        said = await both(made, v31(("time", "{}")), tools=TOOLS, tool_choice=choice)
        assert said.output[0].name == "time" and "start:" in grammar_of(made).lark
    said = await both(made, v31(("weather", WEATHER))[:-40], LENGTH, tools=TOOLS)
    (call,) = said.output
    assert call.status == said.status == "incomplete" and WEATHER.startswith(call.arguments)


async def test_reasoning_is_in_items_with_their_effort(serve: Callable) -> None:
    made = await serve("v31")
    text = "So.\n\nYes." + markers.THINK_END + "Hello"
    said = await both(made, text, reasoning=HIGH | {"summary": "auto"}, include=["reasoning.encrypted_content"])
    assert [item.type for item in said.output] == ["reasoning", "message"]
    assert said.output[0].content[0].text == "So.\n\nYes." and said.output_text == "Hello"
    assert said.usage.output_tokens_details.reasoning_tokens == len("So.\n\nYes.") + 1
    assert prompt_of(made).endswith(markers.THINK)
    said = await both(made, "never ends", LENGTH, reasoning=HIGH)
    assert said.output[0].status == "incomplete" and said.output_text == ""
    await both(made, "Hello", reasoning={"effort": "none"})
    assert prompt_of(made).endswith(markers.THINK_END)


async def test_an_agent_sends_everything_back(serve: Callable) -> None:
    """Two tools, one after the other; every answer goes back as it came, and nothing is kept in between. V3.2 sees its
    reasoning again.
    """
    made, results = await serve("v32"), {"weather": "sunny", "time": "noon"}
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    async with client_of(made) as client:
        for name in ("weather", "time", ""):
            says = "I look." + v32((name, '{"city": "Oslo"}')) if name else "Sunny at noon."
            say(made, f"Hm.{markers.THINK_END}{says}")
            async with client.responses.stream(model="tiny", input=items, tools=TOOLS, reasoning=HIGH) as stream:
                answer = await stream.get_final_response()
            items += answer.output
            calls = [item for item in answer.output if isinstance(item, ResponseFunctionToolCall)]
            assert [call.name for call in calls] == ([name] if name else [])
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": results[call.name]}
                      for call in calls]  # fmt: skip
    assert answer.output_text == "Sunny at noon." and answer.status == "completed"
    prompt = prompt_of(made)
    assert prompt.count(f"{markers.THINK}Hm.{markers.THINK_END}I look.\n\n<{markers.DSML}function_calls>") == 2
    assert prompt.endswith(markers.THINK) and "None" not in prompt
    assert prompt.index("Weather?") < prompt.index("sunny") < prompt.index("noon")


async def test_a_schema_for_the_answer(serve: Callable) -> None:
    """Those that its client makes of classes are in test_vendor_helpers.py."""
    made = await serve("v31")
    await both(made, "{}", text={"format": {"type": "json_object"}, "verbosity": "low"})
    assert json.loads(grammar_of(made).json_schema) == {"type": "object"}


async def test_errors_become_the_clients_exceptions(pair: Cluster) -> None:
    async with client_of(pair) as client:
        with pytest.raises(openai.BadRequestError, match="keeps nothing"):
            await client.responses.create(model="tiny", input="x", previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_1")
        pair.prefills[0].script.append(fails("LAYOUT_MISMATCH"))
        pair.decodes[0].script.append(hangs())
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model="tiny", input="x", stream=True)
        for reason, code in (("INTERNAL", "server_error"), ("CONTEXT_TOO_LONG", "context_length_exceeded")):
            pair.decodes[0].script.append(fails(reason, after=2))
            stream = await client.responses.create(model="tiny", input="x", stream=True)
            *_, last = [event async for event in stream]
            assert last.type == "response.failed" and last.response.error.code == code
            assert reason in last.response.error.message and last.response.output[0].status == "incomplete"
    await pair.quiet()
