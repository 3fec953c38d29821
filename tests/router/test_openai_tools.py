"""Tools, thoughts and response formats as the openai client sees them, in the formats of all models."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from millrace.v1 import common_pb2, worker_pb2
from millrace_router.text import markers
from millrace_router.text.chat_format import Style
from millrace_router.text.tokenizer import Tokenizer
from millrace_serve.engine.core import Grammar, GrammarKind
from millrace_serve.engine.grammar.xgrammar_compiler import XgrammarCompiler
from millrace_testing import paths
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from router.fake_worker import FakeWorker
from router.harness import Cluster
from router.scripted import HELLO, SCHEMA, TOOLS, grammar_of, prompt_of, say
from router.test_parsers import CALL_MARKS, FORMS, WEATHER, v3, v31
from tokenizers import Tokenizer as HfTokenizer

CALLS = [("weather", WEATHER), ("time", "{}")]
TINY, TINY_EOS = HfTokenizer.from_file(str(paths.TINY / "tokenizer.json")), 1
COMPILER = XgrammarCompiler(paths.TINY, 1024, [TINY_EOS])


def client_of(made: Cluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0)


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> tuple[str, str, list[tuple[str, str]], str | None]:
    """(thoughts, text, calls, finish reason), put together as clients do."""
    thoughts, text, calls, finish = "", "", [], None
    stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True, **fields)
    async for chunk in stream:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        (choice,) = chunk.choices
        thoughts += choice.delta.model_extra.get("reasoning_content", "")
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.index == len(calls):
                assert call.id.startswith(("call_", "functions.")) and call.type == "function"
                calls.append((call.function.name, ""))
            calls[call.index] = calls[call.index][0], calls[call.index][1] + call.function.arguments
        finish = choice.finish_reason
    return thoughts, text, calls, finish


@pytest.mark.parametrize("style", Style)
async def test_calls(serve: Callable, style: Style) -> None:
    made, form = await serve(style.name.lower()), FORMS[style]
    async with client_of(made) as client:
        count = say(made, "I look." + form(*CALLS))
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
        ChatCompletion.model_validate(answer.model_dump(), strict=True)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
        calls = choice.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
        ids = [call.id for call in calls]
        assert len(set(ids)) == 2 and answer.usage.completion_tokens == count
        if style is Style.KIMI:
            assert ids == ["functions.weather:0", "functions.time:1"] and '"description":"Of a city"' in prompt_of(made)
        else:
            assert "Of a city" in prompt_of(made) and json.dumps(SCHEMA) in prompt_of(made)
        assert grammar_of(made) is None
        say(made, form(*CALLS))
        assert await streamed(client, tools=TOOLS) == ("", "", CALLS, "tool_calls")
        say(made, form(*CALLS)[:-30], finish=common_pb2.FINISH_REASON_LENGTH)
        *_, finish = await streamed(client, tools=TOOLS)
        assert finish == "length"
        await made.quiet()


@pytest.mark.parametrize("style", Style)
async def test_what_cannot_be_read_as_a_call_is_text(serve: Callable, style: Style) -> None:
    """At once and in a stream, forced or not. The calls around it are read."""
    made, form = await serve(style.name.lower()), FORMS[style]
    begin, end = CALL_MARKS[style]
    good, other = form(("time", "{}")), form(("other", "{}"))
    cases = [("stop", other), ("stop", good.replace("{}", "777").replace(end, f"777{end}"))]
    cases.append(("tool_calls", form(("time", "{}"), ("other", "{}"), ("time", "{}"))))
    async with client_of(made) as client:
        for wanted, output in cases:
            say(made, output)
            (choice,) = (await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)).choices
            say(made, output)
            _, text, calls, finish = await streamed(client, tools=TOOLS)
            said = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
            assert choice.finish_reason == finish == wanted
            assert (choice.message.content or "", said) == (text, calls)
            assert calls == [("time", "{}")] * (2 if wanted == "tool_calls" else 0)
            assert begin in text and end in text, "whole, with its marks"


async def test_results_of_calls_reach_the_template(serve: Callable) -> None:
    made = await serve("takes")
    turns = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    body = {"messages": turns, "max_tokens": 2, "tools": TOOLS}
    assert (await made.http.post("/v1/chat/completions", json=body)).status_code == 200
    prompt = prompt_of(made)
    assert prompt.startswith('[{"type": "function"') and prompt.endswith("sunny") and "## Tools" not in prompt
    tokens = (await made.http.post("/tokenize", json={"messages": turns, "tools": TOOLS})).json()
    assert tokens["tokens"] == list(made.prefills[0].submitted[-1].token_ids) and tokens["count"] == len(
        tokens["tokens"]
    )
    assert (await made.http.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {"prompt": prompt}
    body["tool_choice"] = "none"
    assert (await made.http.post("/v1/chat/completions", json=body)).status_code == 200
    assert "weather" not in prompt_of(made).split("Weather?")[0]


@pytest.mark.parametrize("style", Style)
async def test_a_required_call_is_in_the_grammar(serve: Callable, style: Style) -> None:
    made, form = await serve(style.name.lower()), FORMS[style]
    async with client_of(made) as client:
        for choice, names, more in (
            ("required", ["weather", "time"], True),
            ({"type": "function", "function": {"name": "time"}}, ["time"], False),
        ):
            say(made, form(("time", "{}")))
            *_, calls, finish = await streamed(client, tools=TOOLS, tool_choice=choice)
            assert calls == [("time", "{}")] and finish == "tool_calls"
            tag = grammar_of(made).structural_tag
            for name in ("weather", "time"):
                assert allows(tag, form((name, '{"city": "Oslo"}' if name == "weather" else "{}"))) is (name in names)
            assert allows(tag, form(*[(names[-1], "{}")] * 2)) is more, "several calls"
            assert not allows(tag, form((names[-1], "{}"))[:-1]) and not allows(tag, "Hello"), "a call is required"
            assert all(name in prompt_of(made) for name in ("weather", "time")), "all tools are described"


def allows(tag: str, text: str) -> bool:
    """Whether an output of this text is complete for a worker."""
    matcher = COMPILER.compile(Grammar(GrammarKind.STRUCTURAL_TAG, tag))()
    ids = TINY.encode(text, add_special_tokens=False).ids
    return all(matcher.accept(token) for token in ids) and bool(matcher.mask[0] & 1 << TINY_EOS)


@pytest.mark.parametrize("style", Style)
async def test_one_call_at_a_time(serve: Callable, style: Style) -> None:
    made = await serve(style.name.lower())
    async with client_of(made) as client:
        say(made, FORMS[style](*CALLS))
        *_, calls, finish = await streamed(client, tools=TOOLS, parallel_tool_calls=False, stop=["☂"] * 16)
        assert calls == CALLS[:1] and finish == "tool_calls"
        await made.quiet()


async def test_strict_tools_constrain_what_is_called_but_not_whether(serve: Callable) -> None:
    made = await serve("v31")
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    async with client_of(made) as client:
        say(made, "No need.")
        assert await streamed(client, tools=strict) == ("", "No need.", [], "stop")
    assert json.loads(grammar_of(made).structural_tag)["format"]["type"] == "triggered_tags"


async def test_thoughts(serve: Callable) -> None:
    made = await serve("r1")
    async with client_of(made) as client:
        thoughts = "So.\n\nYes."
        say(made, f"{thoughts}\n{markers.THINK_END}\n\nHello")
        answer = await client.chat.completions.create(model="tiny", messages=HELLO)
        ChatCompletion.model_validate(answer.model_dump(), strict=True)
        message = answer.choices[0].message
        assert (message.content, message.model_extra["reasoning_content"]) == ("Hello", thoughts)
        assert answer.usage.completion_tokens_details.reasoning_tokens == len(thoughts) + 2
        say(made, f"{thoughts}\n{markers.THINK_END}\n\n{v3(*CALLS)}")
        assert await streamed(client, tools=TOOLS) == (thoughts, "", CALLS, "tool_calls")
        say(made, "never ends", finish=common_pb2.FINISH_REASON_LENGTH)
        assert await streamed(client) == ("never ends", "", [], "length")


async def test_calls_that_end_the_thoughts_of_kimi_are_not_counted_as_thoughts(serve: Callable) -> None:
    made, thoughts = await serve("kimi"), f"{markers.THINK}Hm."
    async with client_of(made) as client:
        say(made, thoughts + FORMS[Style.KIMI](*CALLS))
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
        assert answer.choices[0].message.tool_calls
        assert answer.usage.completion_tokens_details.reasoning_tokens == len("Hm.") + 2


async def test_thinking_is_an_argument_of_the_template(serve: Callable) -> None:
    """The grammar of a response format begins behind the thoughts."""
    made = await serve("v31")
    end = made.router.inference.tokenizer._hf.token_to_id(markers.THINK_END)
    async with client_of(made) as client:
        for thinking, fields in (
            (False, {"extra_body": {"chat_template_kwargs": {"thinking": False}}}),
            (True, {"extra_body": {"chat_template_kwargs": {"thinking": True}}}),
            (False, {"reasoning_effort": "minimal"}),
            (True, {"reasoning_effort": "low", "verbosity": "low"}),
            (False, {"reasoning_effort": "low", "extra_body": {"chat_template_kwargs": {"thinking": False}}}),
        ):
            say(made, ("Hm." + markers.THINK_END if thinking else "") + "{}")
            said = await streamed(client, response_format={"type": "json_object"}, **fields)
            assert said == ("Hm." if thinking else "", "{}", [], "stop")
            grammar = grammar_of(made)
            assert json.loads(grammar.json_schema) == {"type": "object"}
            assert (grammar.after_token_id == end) is grammar.HasField("after_token_id") is thinking


async def test_response_formats(pair: Cluster) -> None:
    class City(BaseModel):
        name: str

    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    cases = [
        ({"response_format": schema}, common_pb2.Grammar(json_schema=json.dumps(SCHEMA))),
        ({"response_format": {"type": "json_object"}}, common_pb2.Grammar(json_schema='{"type": "object"}')),
        ({"response_format": {"type": "regex", "regex": "a+"}}, common_pb2.Grammar(regex="a+")),
        ({"guided_regex": "a+"}, common_pb2.Grammar(regex="a+")),
        ({"response_format": {"type": "text"}}, None),
    ]
    for fields, grammar in cases:
        for path, prompt in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "x"})):
            answer = await pair.http.post(path, json=prompt | {"max_tokens": 2} | fields)
            assert answer.status_code == 200, answer.text
            assert grammar_of(pair) == grammar
    async with client_of(pair) as client:
        with pytest.raises(
            openai.LengthFinishReasonError
        ):  # the client's own schema is understood; the fake is cut off
            await client.chat.completions.parse(model="tiny", messages=HELLO, response_format=City, max_tokens=2)
    assert json.loads(grammar_of(pair).json_schema)["title"] == "City"


DEEP = json.loads('{"a":' * 90 + "1" + "}" * 90)
BAD: dict[str, tuple[dict[str, Any], str, str]] = {  # what is wrong: (fields, param, words)
    "no tools": ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    "unknown name": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'",
    ),
    "two of a name": ({"tools": [TOOLS[1], TOOLS[1]]}, "tools", "is there already"),
    "bad name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "letters"),
    "too many": ({"tools": [TOOLS[1]] * 129}, "tools", "at most 128"),
    "surrogate": (
        {"tools": [{"type": "function", "function": {"name": "a", "description": "\ud800"}}]}, "tools", "UTF-8",
    ),
    "tools and format": (
        {"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "tool_choice to none",
    ),
    "both": ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "combined"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is required"),
    "regex of a schema": ({"response_format": {"type": "json_object", "regex": "a"}}, "response_format", "no meaning"),
    "unknown format": ({"response_format": {"type": "xml"}}, "response_format", "response_format.type"),
    "empty regex": ({"guided_regex": ""}, "guided_regex", "0 bytes"),
    "long regex": ({"guided_regex": "a" * 70_000}, "guided_regex", "65536"),
    "deep schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
        "response_format", "more than 64 deep",
    ),
    "deeper schema": ({"tools": json.loads("[" * 300 + "]" * 300)}, "tools", "deep"),
    "ignore_eos": ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
    "min_tokens": ({"guided_regex": "a", "min_tokens": 1}, "min_tokens", "guided_regex"),
    "content": ({"messages": [{"role": "user"}]}, "messages", "content is required"),
    "calls of a user": (
        {"messages": [{"role": "user", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages", "assistant",
    ),
    "functions": ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities", "modalities.1"),
    "tool without a type": ({"tools": [{"function": {"name": "f"}}]}, "tools", "tools.0.type is required"),
    "suffix": ({"suffix": "x"}, "suffix", "not supported"),
    "echo": ({"echo": True}, "echo", "not supported"),
    "template": ({"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs", "UTF-8"),
}  # fmt: skip


async def test_refusals(serve: Callable) -> None:
    made = await serve("v31")
    for name, (fields, param, words) in BAD.items():
        body = json.dumps({"messages": HELLO, "max_tokens": 2} | fields)
        answer = await made.http.post("/v1/chat/completions", content=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param and words in error["message"], (name, error)
    assert not any(worker.submitted for worker in made.workers)


async def test_a_grammar_that_only_workers_can_refuse(pair: Cluster) -> None:
    async def refuses(
        worker: FakeWorker, request: worker_pb2.EngineRequest
    ) -> AsyncIterator[worker_pb2.SequenceOutput]:
        failure = common_pb2.Failure(reason="INVALID_ARGUMENT", message="regex: the parenthesis is not closed")
        finish = common_pb2.FINISH_REASON_ERROR
        yield worker_pb2.SequenceOutput(id=request.id, finish_reason=finish, failure=failure)

    for worker in pair.workers:
        worker.script.append(refuses)
    answer = await pair.http.post("/v1/completions", json={"prompt": "x", "guided_regex": "(", "stream": True})
    assert answer.status_code == 400 and "parenthesis" in answer.json()["error"]["message"]
    assert len(pair.prefills[0].submitted) == 1, "no other worker would take it"


async def test_answers_go_back_as_the_clients_objects(serve: Callable) -> None:
    """They have a null for every field that the answer did not have."""
    made = await serve("v31")
    async with client_of(made) as client:
        say(made, v31(*CALLS))
        message = (await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "x"} for call in message.tool_calls]
        dumped = message.model_dump()
        assert dumped["function_call"] is dumped["audio"] is None
        for said in (message, dumped, dumped | {"annotations": []}):
            say(made, "Done.")
            answer = await client.chat.completions.create(model="tiny", messages=[*HELLO, said, *results], tools=TOOLS)
            assert answer.choices[0].message.content == "Done."
    assert len({tuple(request.token_ids) for request in made.prefills[0].submitted[1:]}) == 1


async def test_nulls_are_absent_fields(serve: Callable) -> None:
    made, messages = await serve("v31"), {"messages": HELLO, "max_tokens": 2}
    schema = {"type": "object", "properties": {"a": {"enum": ["a", None], "default": None}}}
    nulls = {"strict": None, "defer_loading": None}
    for path, body in (
        ("/v1/chat/completions", {**messages, "stream_options": {"include_usage": None}}),
        ("/v1/responses", {"input": [{"role": "user", "content": "x", "phase": None}], "text": {"format": None}}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": schema, **nulls}]}),
        ("/v1/messages", {**messages, "tools": [{"name": "f", "input_schema": schema, **nulls}]}),
        ("/v1/messages", {**messages, "tool_choice": {"type": "auto", "disable_parallel_tool_use": None}}),
    ):
        say(made, "Done.")
        answer = await made.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert "tools" not in body or json.dumps(schema) in prompt_of(made), "nulls within JSON stay"


def test_a_template_chooses_the_format_by_a_mark_in_a_comment(folders: dict[str, Path], tmp_path: Path) -> None:
    """Whatever the folder's own template and vocabulary say."""
    marks = {Style.V3: "<｜tool▁calls▁begin｜> ```json", Style.V31: "<｜tool▁calls▁begin｜>", Style.V32: markers.DSML,
             Style.KIMI: markers.KIMI.calls}  # fmt: skip
    for (style, mark), folder in itertools.product(marks.items(), folders.values()):
        file = tmp_path / "mine.jinja"
        file.write_text(f"{{# {mark} #}}{{{{ messages[0].content }}}}")
        tokenizer = Tokenizer.load(folder, str(file))
        assert tokenizer.format.style is style and tokenizer.render(HELLO) == "Weather?"


def test_formats_are_found_out(folders: dict[str, Path], model_folder: Path, tmp_path: Path) -> None:
    styles = {name: Tokenizer.load(folder).format for name, folder in folders.items()}
    assert [styles[name].style.name for name in ("v3", "v31", "r1", "takes")] == ["V3", "V31", "V3", "V31"]
    assert (styles["v32"].style, styles["kimi"].style) == (Style.V32, Style.KIMI)
    assert styles["takes"].takes_tools and not styles["v3"].takes_tools and styles["r1"].reasons
    plain = Tokenizer.load(model_folder).format
    assert plain.style is None and not plain.reasons
    other = tmp_path / "other.jinja"
    other.write_text("{{ tools }}")
    assert Tokenizer.load(model_folder, str(other)).format.takes_tools
