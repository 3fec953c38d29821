"""The Messages API as its own Python client sees it."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, ToolUseBlock
from millrace.v1 import common_pb2
from millrace_router.text import markers
from router.apis.openai.test_openai import text_of
from router.fake_worker import fails, hangs
from router.harness import Cluster
from router.scripted import SCHEMA, grammar_of, prompt_of, say
from router.text.test_parsers import WEATHER, v31, v32

HELLO = [{"role": "user", "content": "Weather?"}]
TOOLS = [
    {"name": "weather", "description": "Of a city", "input_schema": SCHEMA},
    {"name": "time", "input_schema": {"type": "object", "properties": {}}},
]
THINKING = {"type": "enabled", "budget_tokens": 1024}
LENGTH = common_pb2.FINISH_REASON_LENGTH


def client_of(made: Cluster, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=made.url, api_key=key, max_retries=0)


async def both(made: Cluster, text: str, finish: int = common_pb2.FINISH_REASON_STOP, **fields: Any) -> Message:
    """The answer, which is the same at once and streamed."""
    fields = {"model": "tiny", "max_tokens": 3000, "messages": HELLO} | fields
    async with client_of(made) as client:
        say(made, text, finish)
        whole = await client.messages.create(**fields)
        Message.model_validate(whole.model_dump(), strict=True)
        say(made, text, finish)
        events = [event async for event in await client.messages.create(**fields, stream=True)]
        for event in events:
            type(event).model_validate(event.model_dump(), strict=True)
        say(made, text, finish)
        async with client.messages.stream(**fields) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
    signed = [last.delta.type for last, end in pairwise(events) if end.type == "content_block_stop"]
    assert [kind == "signature_delta" for kind in signed] == [block.type == "thinking" for block in whole.content]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)
    assert as_sent(streamed) == as_sent(whole)
    await made.quiet()
    return whole


def as_sent(message: Message) -> dict[str, Any]:
    """Without what is drawn for each answer."""
    sent = message.model_dump(exclude={"id": True, "content": {"__all__": {"id"}}})
    return sent | {"content": [{k: v for k, v in block.items() if v is not None} for block in sent["content"]]}


def prompt_tokens(message: Message) -> int:
    usage = message.usage
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


async def test_a_text_is_the_same_at_once_and_streamed(pair: Cluster) -> None:
    async with client_of(pair) as client:
        fields = {"model": "tiny", "max_tokens": 8, "messages": HELLO, "extra_body": {"seed": 0}}
        answer = await client.messages.create(**fields, system="Be brief.", metadata={"user_id": "me"})
        assert [block.text for block in answer.content] == [text_of(pair)] and answer.stop_reason == "max_tokens"
        prompt = len(pair.prefills[0].submitted[0].token_ids)
        assert prompt_tokens(answer) == prompt
        assert answer.usage.output_tokens == 8 and "Be brief." in prompt_of(pair)
        assert answer._request_id == pair.prefills[0].submitted[0].request_id
        async with client.messages.stream(**fields) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == text_of(pair, 1) == final.content[0].text and final.usage.output_tokens == 8
    await pair.quiet()


async def test_a_stop_sequence_is_named_as_the_reason(serve: Callable) -> None:
    made = await serve("v31")
    said = await both(made, "one two three four", stop_sequences=["four", " three"])
    assert said.content[0].text == "one two"
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", " three")
    said = await both(made, "one")
    assert (said.stop_reason, said.stop_sequence) == ("end_turn", None)
    text = f"The sky.{markers.THINK_END}One " + v31(("weather", WEATHER)) + "sky, two"
    said = await both(made, text, stop_sequences=["Oslo", "sky"], thinking=THINKING, tools=TOOLS)
    assert [block.type for block in said.content] == ["thinking", "text", "tool_use"], "neither ends anything before it"
    assert (said.content[0].thinking, said.stop_sequence) == ("The sky.", "sky")
    used = made.router.inference.tokenizer._encode(text.removesuffix(", two"), add_bos=False)
    assert said.usage.output_tokens == len(used)


async def test_calls_are_blocks_by_choice_of_the_client(serve: Callable) -> None:
    made = await serve("v31")
    said = await both(made, "I look." + v31(("weather", WEATHER), ("time", "")), tools=TOOLS)
    text, weather, time = said.content
    assert text.text == "I look." and said.stop_reason == "tool_use"
    assert (weather.name, weather.input) == ("weather", json.loads(WEATHER)) and (time.name, time.input) == ("time", {})
    assert weather.id != time.id and "Description: Of a city" in prompt_of(made) and grammar_of(made) is None
    one = {"type": "auto", "disable_parallel_tool_use": True}
    said = await both(made, v31(("weather", WEATHER), ("time", "{}")), tools=TOOLS, tool_choice=one)
    assert [block.name for block in said.content] == ["weather"] and said.stop_reason == "tool_use"
    for choice in ({"type": "any"}, {"type": "tool", "name": "time"}):
        said = await both(made, v31(("time", "{}")), tools=TOOLS, tool_choice=choice)
        assert said.stop_reason == "tool_use" and "start:" in grammar_of(made).lark
    said = await both(made, "No.", tools=TOOLS, tool_choice={"type": "none"})
    assert said.content[0].text == "No." and "Of a city" not in prompt_of(made)


async def test_arguments_that_were_cut_off_are_not_lost(serve: Callable) -> None:
    made = await serve("v31")
    async with client_of(made) as client:
        say(made, v31(("weather", WEATHER))[:-40], LENGTH)
        said = await client.messages.create(model="tiny", max_tokens=3000, messages=HELLO, tools=TOOLS)
    (call,) = said.content
    assert WEATHER.startswith(call.input["INVALID_JSON"]) and said.stop_reason == "max_tokens"


async def test_reasoning_is_in_blocks_when_asked_for(serve: Callable) -> None:
    made = await serve("v31")
    text = "So.\n\nYes." + markers.THINK_END + "Hello" + v31(("time", "{}"))
    said = await both(made, text, thinking=THINKING, tools=TOOLS)
    assert [block.type for block in said.content] == ["thinking", "text", "tool_use"]
    assert said.content[0].thinking == "So.\n\nYes." and said.content[1].text == "Hello"
    assert said.usage.output_tokens_details.thinking_tokens == len("So.\n\nYes.") + 1
    assert prompt_of(made).endswith(markers.THINK)
    said = await both(made, text, thinking=THINKING | {"display": "omitted"}, tools=TOOLS)
    assert [block.type for block in said.content] == ["text", "tool_use"]
    await both(made, "Hello", thinking={"type": "disabled"})
    assert prompt_of(made).endswith(markers.THINK_END)


@pytest.mark.parametrize(("more", "reasoning"), [([], 2), ([{"type": "text", "text": "Go on."}], 0)])
async def test_an_agent_sees_its_reasoning_again(more: list[dict[str, str]], reasoning: int, serve: Callable) -> None:
    """Two tools, one after the other; every answer goes back as it came. V3.2 sees its reasoning again until the user
    says more than results.
    """
    made, results = await serve("v32"), {"weather": "sunny", "time": "noon"}
    messages: list[dict[str, Any]] = list(HELLO)
    fields = {"model": "tiny", "max_tokens": 400, "tools": TOOLS, "thinking": THINKING, "system": "Use tools."}
    async with client_of(made) as client:
        for name in ("weather", "time", ""):
            say(made, f"Hm.{markers.THINK_END}" + (v32((name, '{"city": "Oslo"}')) if name else "Sunny at noon."))
            async with client.messages.stream(messages=messages, **fields) as stream:
                answer = await stream.get_final_message()
            counted = await client.messages.count_tokens(messages=messages, model="tiny", tools=TOOLS,
                                                         thinking=THINKING, system="Use tools.")  # fmt: skip
            assert counted.input_tokens == prompt_tokens(answer)
            assert counted.input_tokens == len(made.prefills[0].submitted[-1].token_ids)
            messages.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if isinstance(block, ToolUseBlock)]
            assert [call.name for call in calls] == ([name] if name else [])
            told = [{"type": "tool_result", "tool_use_id": call.id, "content": results[call.name]} for call in calls]
            messages.append({"role": "user", "content": [*told, *more]})
    assert answer.stop_reason == "end_turn" and answer.content[-1].text == "Sunny at noon."
    prompt = prompt_of(made)
    assert prompt.count(f"{markers.THINK}Hm.{markers.THINK_END}") == reasoning
    assert prompt.count("Go on.") == 2 * len(more)
    assert prompt.endswith(markers.THINK) and "None" not in prompt
    assert prompt.index("Use tools.") < prompt.index("Weather?") < prompt.index("sunny") < prompt.index("noon")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_own_agent(stream: bool, serve: Callable) -> None:
    """It asks for a thread that the server keeps, and goes on without one."""
    asked: list[str] = []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        asked.append(city)
        return "sunny"

    made = await serve("v32")
    say(made, f"Hm.{markers.THINK_END}I look." + v32(("weather", '{"city": "Oslo"}')))
    say(made, f"So.{markers.THINK_END}Sunny.")
    async with client_of(made) as client:
        runner = client.beta.messages.tool_runner(
            model="tiny", max_tokens=500, messages=HELLO, tools=[weather], thinking=THINKING, stream=stream
        )
        answer = await runner.until_done()
    assert asked == ["Oslo"] and [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[1].text == "Sunny." and answer.stop_reason == "end_turn"
    assert f"Hm.{markers.THINK_END}I look.\n\n<{markers.DSML}function_calls>" in prompt_of(made)
    assert "sunny" in prompt_of(made) and len(made.decodes[0].submitted) == 2


async def test_a_schema_for_the_answer(serve: Callable) -> None:
    """V3.2 shows it in the prompt."""
    made, form = await serve("v32"), {"format": {"type": "json_schema", "schema": SCHEMA}}
    async with client_of(made) as client:
        say(made, "{}")
        await client.messages.create(model="tiny", max_tokens=99, messages=HELLO, output_config=form)
        counted = await client.messages.count_tokens(model="tiny", messages=HELLO, output_config=form)
    assert json.loads(grammar_of(made).json_schema) == SCHEMA and json.dumps(SCHEMA) in prompt_of(made)
    assert counted.input_tokens == len(made.prefills[0].submitted[-1].token_ids)


async def test_errors_become_the_clients_exceptions(pair: Cluster) -> None:
    fields = {"max_tokens": 8, "messages": HELLO}
    async with client_of(pair) as client:
        with pytest.raises(anthropic.NotFoundError, match="'other' is not served"):
            await client.messages.create(model="other", **fields)
        with pytest.raises(anthropic.BadRequestError, match="no tool calls") as caught:
            await client.messages.create(model="tiny", tools=TOOLS, **fields)
        assert caught.value.request_id == caught.value.body["request_id"]
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.list()
        pair.prefills[0].script.append(fails("LAYOUT_MISMATCH"))
        pair.decodes[0].script.append(hangs())
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error") as refused:
            await client.messages.create(model="tiny", stream=True, **fields)
        assert refused.value.status_code == 503
        pair.decodes[0].script.append(fails("INTERNAL", after=2))
        with pytest.raises(anthropic.APIStatusError, match="api_error"):
            async with client.messages.stream(model="tiny", **fields) as stream:
                await stream.get_final_message()
    await pair.quiet()
