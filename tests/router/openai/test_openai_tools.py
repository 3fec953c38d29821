"""Tools, thoughts and response formats as the openai client sees them, in the formats of all models."""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from millrace.v1 import common_pb2, worker_pb2
from millrace_common.tokenizer_file import byte_characters
from millrace_router.text import markers
from millrace_router.text.chat_format import Style
from millrace_router.text.tokenizer import Tokenizer
from millrace_serve.engine.core import Grammar, GrammarKind
from millrace_serve.engine.grammar.llguidance_compiler import LlguidanceCompiler
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from router.fake_worker import FakeWorker
from router.harness import EOS, Cluster
from router.scripted import HELLO, SCHEMA, TOOLS, grammar_of, prompt_of, say
from router.text.test_parsers import CALL_MARKS, FORMS, WEATHER, v3, v31
from tokenizers import Tokenizer as HfTokenizer

BYTES = byte_characters()
CALLS = [("weather", WEATHER), ("time", "{}")]


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
async def test_a_required_call_is_in_the_grammar(serve: Callable, folders: dict[str, Path], style: Style) -> None:
    made, form = await serve(style.name.lower()), FORMS[style]
    async with client_of(made) as client:
        for choice, names, more in (
            ("required", ["weather", "time"], True),
            ({"type": "function", "function": {"name": "time"}}, ["time"], False),
        ):
            say(made, form(("time", "{}")))
            *_, calls, finish = await streamed(client, tools=TOOLS, tool_choice=choice)
            assert calls == [("time", "{}")] and finish == "tool_calls"
            allows = functools.partial(allowed, folders[style.name.lower()], grammar_of(made))
            for name in ("weather", "time"):
                assert allows(form((name, '{"city": "Oslo"}' if name == "weather" else "{}"))) is (name in names)
            assert allows(form(*[(names[-1], "{}")] * 2)) is more, "several calls"
            assert not allows(form((names[-1], "{}"))[:-1]) and not allows("Hello"), "a call is required"
            assert all(name in prompt_of(made) for name in ("weather", "time")), "all tools are described"


@functools.cache
def compiler_of(folder: Path) -> LlguidanceCompiler:
    tokenizer = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    return LlguidanceCompiler(folder, tokenizer.get_vocab_size(), [tokenizer.token_to_id(EOS)])


def allowed(folder: Path, grammar: common_pb2.Grammar, text: str) -> bool:
    """Whether an output of this text is complete for a worker."""
    core = Grammar(GrammarKind.LARK, grammar.lark, marks=tuple(grammar.marks))
    matcher = compiler_of(folder).compile(core, threading.Event())()
    tokenizer = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(EOS)
    if not all(matcher.accept(token) for token in tokenizer.encode(text, add_special_tokens=False).ids):
        return False
    return bool(matcher.mask.view(np.uint32)[end // 32] >> np.uint32(end % 32) & 1)


@pytest.mark.parametrize("style", Style)
async def test_one_call_at_a_time(serve: Callable, style: Style) -> None:
    made = await serve(style.name.lower())
    async with client_of(made) as client:
        say(made, FORMS[style](*CALLS))
        *_, calls, finish = await streamed(client, tools=TOOLS, parallel_tool_calls=False, stop=["☂"] * 16)
        assert calls == CALLS[:1] and finish == "tool_calls"
        await made.quiet()


async def test_strict_tools_constrain_what_is_called_but_not_whether(serve: Callable, folders: dict[str, Path]) -> None:
    made = await serve("v31")
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    async with client_of(made) as client:
        say(made, "No need.")
        assert await streamed(client, tools=strict) == ("", "No need.", [], "stop")
    allows = functools.partial(allowed, folders["v31"], grammar_of(made))
    assert allows("No need.") and allows("") and allows("I look." + v31(("weather", WEATHER)))
    assert not allows(v31(("weather", '{"city": 7}')))
    assert not allows(v31(("weather", WEATHER)) + "x") and not allows(v31(("weather", WEATHER))[:-1])


@pytest.mark.parametrize("style", Style)
@pytest.mark.parametrize("strict", [True, False])
async def test_a_response_format_beside_tools(
    serve: Callable, folders: dict[str, Path], style: Style, strict: bool
) -> None:
    """An answer in the format, or calls; only calls where one is required."""
    made, form = await serve(style.name.lower()), FORMS[style]
    tools = [{"type": "function", "function": tool["function"] | {"strict": strict}} for tool in TOOLS]
    answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1, "x"]}}}
    wrong = form(("weather", '{"city": 7}'))
    async with client_of(made) as client:
        for said, choice in (("1", "auto"), (form(("time", "{}")), "auto"), (form(("time", "{}")), "required")):
            say(made, said)
            await streamed(client, tools=tools, response_format=answer, tool_choice=choice)
            allows = functools.partial(allowed, folders[style.name.lower()], grammar_of(made))
            assert allows("1") is allows('"x"') is (choice == "auto")
            assert allows(form(("weather", WEATHER))) and allows(form(("weather", WEATHER), ("time", "{}")))
            assert not allows("2") and not allows("Hello") and not allows("1" + form(("time", "{}")))
            assert allows(wrong) is not (strict or choice == "required"), "what is not strict promises nothing"
        say(made, "/a/")
        await streamed(client, tools=tools, response_format={"type": "regex", "regex": "^/[a-z]/$"})
        allows = functools.partial(allowed, folders[style.name.lower()], grammar_of(made))
        assert allows("/a/") and allows(form(("time", "{}"))) and not allows("a") and not allows("")


async def test_marks_are_not_spelled_out(serve: Callable, folders: dict[str, Path]) -> None:
    """Neither in arguments nor in the text before them, however the tokens cut it."""
    made = await serve("v31")
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    async with client_of(made) as client:
        say(made, "No.")
        await streamed(client, tools=strict)
    grammar, tokenizer = grammar_of(made), HfTokenizer.from_file(str(folders["v31"] / "tokenizer.json"))
    assert set(grammar.marks) == set(markers.DEEPSEEK)
    core = Grammar(GrammarKind.LARK, grammar.lark, marks=tuple(grammar.marks))
    factory = compiler_of(folders["v31"]).compile(core, threading.Event())

    def ids(text: str, spelled: bool = False) -> list[int]:
        if not spelled:
            return tokenizer.encode(text, add_special_tokens=False).ids
        return [token for byte in text.encode() for token in [tokenizer.token_to_id(BYTES[byte])]]

    head = v31(("weather", '{"city": "')).removesuffix(markers.DEEPSEEK.call_end + markers.DEEPSEEK.calls_end)
    for before, mark in (([], markers.DEEPSEEK.calls), (ids("Well. " + head), markers.DEEPSEEK.call_end)):
        matcher = factory()
        assert all(matcher.accept(token) for token in [*before, *ids(mark, True)[:-1]])
        last = ids(mark, True)[-1]
        assert not matcher.mask.view(np.uint32)[last // 32] >> np.uint32(last % 32) & 1 and not matcher.accept(last)
        assert matcher.accept(ids("x")[0]), "anything else goes on"


async def test_thoughts_that_a_call_would_end_have_none(serve: Callable) -> None:
    made = await serve("kimi")
    async with client_of(made) as client:
        say(made, FORMS[Style.KIMI](("time", "{}")))
        await streamed(client, tools=TOOLS, tool_choice="required")
    mark = made.router.inference.tokenizer.added_token(markers.KIMI.calls)
    assert list(grammar_of(made).forbidden_before) == [mark]


async def test_schemas_that_cannot_be_kept_are_refused_before_any_work(serve: Callable) -> None:
    made = await serve("v31")
    bad = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    patterns = {"type": "object", "patternProperties": {"^a": {}, "b$": {}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad, "strict": True}}
    several = {
        "type": "function",
        "function": {"name": "g", "parameters": {"properties": {"p": patterns}}, "strict": True},
    }
    chosen = {"type": "function", "function": {"name": "h", "parameters": bad}}
    form = {"type": "json_schema", "json_schema": {"schema": bad}}
    product = {"allOf": [{"anyOf": [{"type": "string", "maxLength": i * 99 + k} for k in range(30)]} for i in range(5)]}
    for fields, param, words in (
        ({"response_format": form}, "response_format", "at #/properties/a/uniqueItems: "),
        ({"response_format": form, "tools": TOOLS}, "response_format", "at #/properties/a/uniqueItems: "),
        ({"tools": [tool]}, "tools", "of f cannot be kept at #/properties/a/uniqueItems: "),
        ({"tools": [several]}, "tools", "of g cannot be kept at #/properties/p"),
        ({"tools": [chosen], "tool_choice": "required"}, "tools", "of h cannot be kept at #/properties/a/uniqueItems"),
        ({"guided_regex": "a(?=b)"}, "guided_regex", "look-around"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": product}}},
            "response_format",
            "schema too large",
        ),
    ):
        answer = await made.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2} | fields)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param and words in error["message"], error
    assert not any(worker.submitted for worker in made.workers)
    say(made, "No.")
    answer = await made.http.post("/v1/chat/completions", json={"messages": HELLO, "tools": [chosen]})
    assert answer.status_code == 200, "a tool that is not strict promises nothing"


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
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name", "'x'",
    ),
    "two of a name": ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].function.name", "is there already"),
    "bad name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "{1,64}"),
    "too many": ({"tools": [TOOLS[1]] * 129}, "tools", "at most 128"),
    "surrogate": (
        {"tools": [{"type": "function", "function": {"name": "a", "description": "\ud800"}}]},
        "tools[0].function.description", "UTF-8",
    ),
    "both": ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "combined"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
    "regex of a schema": (
        {"response_format": {"type": "json_object", "regex": "a"}}, "response_format.regex", "no meaning",
    ),
    "unknown format": ({"response_format": {"type": "xml"}}, "response_format.type", "must be 'text', "),
    "empty regex": ({"guided_regex": ""}, "guided_regex", "0 bytes"),
    "long regex": ({"guided_regex": "a" * 70_000}, "guided_regex", "4096"),
    "deep schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
        "response_format", "more than 64 deep",
    ),
    "deeper schema": ({"tools": json.loads("[" * 300 + "]" * 300)}, "tools", "deep"),
    "ignore_eos": ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
    "min_tokens": ({"guided_regex": "a", "min_tokens": 1}, "min_tokens", "guided_regex"),
    "content": ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
    "calls of a user": (
        {"messages": [{"role": "user", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages[0].tool_calls", "assistant",
    ),
    "functions": ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities[1]", "must be 'text'"),
    "tool without a type": ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "is required"),
    "suffix": ({"suffix": "x"}, "suffix", "not supported"),
    "echo": ({"echo": True}, "echo", "not supported"),
    "template": ({"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs.a", "UTF-8"),
}  # fmt: skip


async def test_refusals(serve: Callable) -> None:
    made = await serve("v31")
    for name, (fields, param, words) in BAD.items():
        body = json.dumps({"messages": HELLO, "max_tokens": 2} | fields)
        answer = await made.http.post("/v1/chat/completions", content=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param and words in error["message"], (name, error)
        assert error["message"].startswith(param), name
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
    answer = await pair.http.post("/v1/completions", json={"prompt": "x", "guided_regex": "a", "stream": True})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "guided_regex")
    assert error["message"] == "guided_regex is refused: regex: the parenthesis is not closed"
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
