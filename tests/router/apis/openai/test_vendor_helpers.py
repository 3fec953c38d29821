"""What the vendors' clients build on top of requests: parsed answers, accumulated streams, raw responses, retries."""

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
import anyio
import openai
import pytest
from pydantic import BaseModel
from router.apis.anthropic.test_anthropic import client_of as anthropic_of
from router.apis.openai.test_openai import text_of
from router.apis.openai.test_openai_tools import client_of as openai_of
from router.fake_worker import DECODE, PREFILL, FakeWorker
from router.harness import Cluster
from router.scripted import HELLO, grammar_of, say
from router.text.test_parsers import v31


class City(BaseModel):
    name: str
    inhabitants: int


OSLO = City(name="Oslo", inhabitants=700_000)
CALL = v31(("City", OSLO.model_dump_json()))
ASKED: dict[str, Any] = {"model": "tiny", "messages": HELLO}


async def test_openais_client_parses_classes_and_strict_functions(serve: Callable) -> None:
    """Schemas and strict functions made of classes, at once and as a stream."""
    made = await serve("v31")
    async with openai_of(made) as client:
        say(made, OSLO.model_dump_json())
        answer = await client.chat.completions.parse(**ASKED, response_format=City)
        assert answer.choices[0].message.parsed == OSLO and "inhabitants" in grammar_of(made).json_schema
        say(made, OSLO.model_dump_json())
        async with client.chat.completions.stream(**ASKED, response_format=City) as stream:
            kinds = {event.type async for event in stream}
            streamed = await stream.get_final_completion()
        assert streamed.choices[0].message.parsed == OSLO and {"content.delta", "content.done"} <= kinds
        tools = [openai.pydantic_function_tool(City)]
        say(made, CALL)
        answer = await client.chat.completions.parse(**ASKED, tools=tools)
        assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == OSLO
        assert grammar_of(made).lark, "the client asks for strict ones"
        say(made, CALL)
        async with client.chat.completions.stream(**ASKED, tools=tools) as stream:
            kinds = {event.type async for event in stream}
            streamed = await stream.get_final_completion()
        assert streamed.choices[0].message.tool_calls[0].function.parsed_arguments == OSLO
        assert "tool_calls.function.arguments.done" in kinds
        say(made, OSLO.model_dump_json())
        async with client.responses.stream(model="tiny", input="A city?", text_format=City) as events:
            assert (await events.get_final_response()).output_parsed == OSLO
        say(made, OSLO.model_dump_json())
        parsed = await client.responses.parse(model="tiny", input="A city?", text_format=City)
        assert parsed.output_parsed == OSLO and "inhabitants" in grammar_of(made).json_schema
    await made.quiet()


async def test_anthropics_client_parses_classes(serve: Callable) -> None:
    made = await serve("v31")
    fields = {**ASKED, "max_tokens": 200}
    async with anthropic_of(made) as client:
        for messages in (client.messages, client.beta.messages):
            say(made, OSLO.model_dump_json())
            answer = await messages.parse(**fields, output_format=City)
            assert answer.parsed_output == OSLO and "inhabitants" in grammar_of(made).json_schema
            say(made, OSLO.model_dump_json())
            async with messages.stream(**fields, output_format=City) as stream:
                assert (await stream.get_final_message()).parsed_output == OSLO
            counted = await messages.count_tokens(**ASKED)
            assert counted.input_tokens == len(made.prefills[0].submitted[-1].token_ids)
    await made.quiet()


async def test_raw_responses_have_ids_and_events(pair: Cluster) -> None:
    headers = {"x-request-id": "mine-7"}
    async with openai_of(pair) as client, anthropic_of(pair) as other:
        create = client.chat.completions.with_raw_response.create
        raw = await create(**ASKED, max_tokens=8, seed=0, extra_headers=headers)
        assert raw.status_code == 200 and raw.headers["x-request-id"] == "mine-7"
        assert raw.parse().choices[0].message.content == text_of(pair) and raw.parse()._request_id == "mine-7"
        stream = client.responses.with_streaming_response.create
        async with stream(model="tiny", input="x", max_output_tokens=8, stream=True) as streamed:
            lines = [line async for line in streamed.iter_lines() if line.startswith("event: ")]
        assert lines[0] == "event: response.created" and lines[-1] == "event: response.incomplete"
        message = await other.messages.with_raw_response.create(**ASKED, max_tokens=8, extra_headers=headers)
        assert message.request_id == "mine-7" and (await message.parse()).stop_reason == "max_tokens"
        assert [model.id async for model in client.models.list()] == ["tiny"]
    await pair.quiet()


@pytest.mark.parametrize("name", ["openai", "anthropic"])
async def test_retries_come_when_the_router_says(name: str, cluster: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is full until the client waits, as long as it was told."""
    made = await cluster(FakeWorker(PREFILL, capacity=0), FakeWorker(DECODE), queue_size=1)
    waiting = asyncio.create_task(made.generate([3, 1, 4]))
    await made.until(lambda: len(made.router.admission) == 1)
    pauses: list[float] = []
    sleep = anyio.sleep

    async def pause(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
            made.prefills[0].change(capacity=4)
            await waiting
        await sleep(0)

    monkeypatch.setattr(anyio, "sleep", pause)
    vendor, make = (openai, openai_of) if name == "openai" else (anthropic, anthropic_of)
    async with make(made) as client:

        async def ask(retries: int) -> Any:
            patient = client.with_options(max_retries=retries)
            create = patient.chat.completions.create if name == "openai" else patient.messages.create
            return await create(**ASKED, max_tokens=8)

        with pytest.raises(vendor.RateLimitError) as caught:
            await ask(0)
        assert caught.value.response.headers["retry-after"] == "1" and not pauses
        answer = await ask(2)
    assert pauses == [1.0] and answer.model == "tiny"
    await made.quiet()
