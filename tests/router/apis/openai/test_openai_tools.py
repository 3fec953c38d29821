"""Tools, reasoning and response formats as the openai client sees them, in the formats of all models."""

import functools
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from millrace.v1 import common_pb2
from millrace_common.tokenizer_file import byte_characters
from millrace_router.apis import tool_parameters
from millrace_router.text import markers
from millrace_router.text.chat_format import Style
from millrace_router.text.tokenizer import Tokenizer
from millrace_serve.engine.core import Grammar, GrammarKind
from millrace_serve.engine.grammar.llguidance_compiler import LlguidanceCompiler
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter
from router.fake_worker import fails
from router.harness import EOS, Cluster
from router.scripted import HELLO, SCHEMA, TOOLS, grammar_of, prompt_of, say
from router.text.test_parsers import CALL_MARKS, FORMS, WEATHER, v3, v31
from tokenizers import Tokenizer as HfTokenizer

BYTES = byte_characters()
CALLS = [("weather", WEATHER), ("time", "{}")]


def client_of(made: Cluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0)


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> tuple[str, str, list[tuple[str, str]], str | None]:
    """(reasoning, text, calls, finish reason), put together as clients do."""
    reasoning, text, calls, finish = "", "", [], None
    stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True, **fields)
    async for chunk in stream:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        (choice,) = chunk.choices
        reasoning += choice.delta.model_extra.get("reasoning_content", "")
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.index == len(calls):
                assert call.id.startswith(("call_", "functions.")) and call.type == "function"
                calls.append((call.function.name, ""))
            calls[call.index] = calls[call.index][0], calls[call.index][1] + call.function.arguments
        finish = choice.finish_reason
    return reasoning, text, calls, finish


@pytest.mark.parametrize("style", Style)
async def test_calls_are_read_at_once_and_streamed(serve: Callable, style: Style) -> None:
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
def tokenizer_of(folder: Path) -> HfTokenizer:
    return HfTokenizer.from_file(str(folder / "tokenizer.json"))


@functools.cache
def compiler_of(folder: Path) -> LlguidanceCompiler:
    tokenizer = tokenizer_of(folder)
    return LlguidanceCompiler(folder, tokenizer.get_vocab_size(), [tokenizer.token_to_id(EOS)])


@functools.cache
def compiled(folder: Path, lark: str, marks: tuple[str, ...]) -> Callable[[], Any]:
    return compiler_of(folder).compile(Grammar(GrammarKind.LARK, lark, marks=marks), threading.Event())


def allowed(folder: Path, grammar: common_pb2.Grammar, text: str) -> bool:
    """Whether an output of this text is complete for a worker."""
    matcher = compiled(folder, grammar.lark, tuple(grammar.marks))()
    tokenizer = tokenizer_of(folder)
    end = tokenizer.token_to_id(EOS)
    if not all(matcher.accept(token) for token in tokenizer.encode(text, add_special_tokens=False).ids):
        return False
    return bool(matcher.mask.view(np.uint32)[end // 32] >> np.uint32(end % 32) & 1)


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
    grammar, tokenizer = grammar_of(made), tokenizer_of(folders["v31"])
    assert set(grammar.marks) == set(markers.DEEPSEEK)
    factory = compiled(folders["v31"], grammar.lark, tuple(grammar.marks))

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


async def test_reasoning_that_a_call_would_end_has_none(serve: Callable) -> None:
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
        answer = await made.direct.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2} | fields)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param and words in error["message"], error
    assert not any(worker.submitted for worker in made.workers)
    say(made, "No.")
    answer = await made.direct.post("/v1/chat/completions", json={"messages": HELLO, "tools": [chosen]})
    assert answer.status_code == 200, "a tool that is not strict promises nothing"


async def test_reasoning_stands_beside_the_content(serve: Callable) -> None:
    made = await serve("r1")
    async with client_of(made) as client:
        reasoning = "So.\n\nYes."
        say(made, f"{reasoning}\n{markers.THINK_END}\n\nHello")
        answer = await client.chat.completions.create(model="tiny", messages=HELLO)
        ChatCompletion.model_validate(answer.model_dump(), strict=True)
        message = answer.choices[0].message
        assert (message.content, message.model_extra["reasoning_content"]) == ("Hello", reasoning)
        assert answer.usage.completion_tokens_details.reasoning_tokens == len(reasoning) + 2
        say(made, f"{reasoning}\n{markers.THINK_END}\n\n{v3(*CALLS)}")
        assert await streamed(client, tools=TOOLS) == (reasoning, "", CALLS, "tool_calls")
        say(made, "never ends", finish=common_pb2.FINISH_REASON_LENGTH)
        assert await streamed(client) == ("never ends", "", [], "length")


async def test_calls_that_end_the_reasoning_of_kimi_are_not_counted_as_reasoning(serve: Callable) -> None:
    made, reasoning = await serve("kimi"), f"{markers.THINK}Hm."
    async with client_of(made) as client:
        say(made, reasoning + FORMS[Style.KIMI](*CALLS))
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
        assert answer.choices[0].message.tool_calls
        assert answer.usage.completion_tokens_details.reasoning_tokens == len("Hm.") + 2


async def test_thinking_is_an_argument_of_the_template(serve: Callable) -> None:
    """The grammar of a response format begins behind the reasoning."""
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


async def test_response_formats_become_grammars(pair: Cluster) -> None:
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


async def test_a_grammar_that_only_workers_can_refuse(pair: Cluster) -> None:
    for worker in pair.workers:
        worker.script.append(fails("INVALID_ARGUMENT"))
    answer = await pair.http.post("/v1/completions", json={"prompt": "x", "guided_regex": "a", "stream": True})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "guided_regex")
    assert error["message"] == "guided_regex is refused: scripted INVALID_ARGUMENT"
    assert len(pair.prefills[0].submitted) == 1, "no other worker would take it"


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


# ------------------------------------------------------------------------------------- parameters of tools


OBJECT, TEXT, NULL = {"type": "object"}, {"type": "string"}, {"type": "null"}
NULLS = OBJECT | {"properties": {"a": OBJECT | {"properties": None}}, "required": None}  # as Go writes empty lists
PLACE = {"properties": {"city": TEXT}, "required": ["city"]}
A, B = ({"properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("a", "b"))
ENDLESS = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}  # no grammar holds it: such a call is not forced
SCHEMAS: list[tuple[Any, Any]] = [  # of parameters, and what becomes of them; None: 400
    ({}, OBJECT),
    ({"description": "Any."}, OBJECT | {"description": "Any."}),
    (PLACE, OBJECT | PLACE),
    (OBJECT | PLACE, OBJECT | PLACE),
    ({"type": ["object", "null"]} | PLACE, OBJECT | PLACE),
    ({"anyOf": [PLACE, NULL, TEXT]}, OBJECT | {"anyOf": [PLACE]}),
    ({"oneOf": [OBJECT | A, NULL, OBJECT | B]}, OBJECT | {"oneOf": [OBJECT | A, OBJECT | B]}),
    ({"enum": [{"a": 1}, 1, None]}, OBJECT | {"enum": [{"a": 1}]}),
    ({"const": {"a": 1}}, OBJECT | {"const": {"a": 1}}),
    (NULLS, NULLS),
    ({"allOf": [PLACE, OBJECT]}, OBJECT | {"allOf": [PLACE, OBJECT]}),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": PLACE}}, OBJECT | {"$ref": "#/$defs/a~1b", "$defs": {"a/b": PLACE}}),
    (ENDLESS, OBJECT | ENDLESS),
    *((schema, None) for schema in (
        TEXT, {"type": ["string", "null"]}, {"type": []}, {"type": "dict"}, {"enum": [1, "a"]}, {"enum": []},
        {"const": 7}, {"anyOf": [TEXT, NULL]}, {"oneOf": [{"enum": [1]}, False]}, {"anyOf": []},
        {"allOf": [PLACE, TEXT]},
        OBJECT | {"anyOf": [TEXT]}, {"$ref": "#/$defs/a", "$defs": {"a": TEXT}}, True, False, [], "object", 7,
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    "defs",
    [{"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 2}},
     {"abcd"[i]: json.loads('{"anyOf": [' * 60 + f'{{"$ref": "#/$defs/{"bcda"[i]}"}}' + "]}" * 60) for i in range(4)}],
    ids=["wide", "deep"],
)  # fmt: skip
def test_references_cost_as_much_as_there_are(defs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is looked at once, whatever refers to it."""
    looks, look = [], tool_parameters._narrowed
    monkeypatch.setattr(tool_parameters, "_narrowed", lambda *given: looks.append(given) or look(*given))
    given = {"$ref": "#/$defs/a", "$defs": defs}
    assert TypeAdapter(tool_parameters.Parameters).validate_python(given) == OBJECT | given
    assert len(looks) < 300


async def test_parameters_are_of_an_object(serve: Callable, folders: dict[str, Path]) -> None:
    """In every API, whether or not the call is forced: arguments are an object, so no grammar makes a 777."""
    made = await serve("v31")
    for given, wanted in SCHEMAS:
        await check(made, folders["v31"], given, wanted)


async def check(made: Cluster, folder: Path, given: Any, wanted: Any) -> None:
    messages = {"messages": HELLO, "max_tokens": 9}
    function = {"name": "f", "parameters": given}
    named = {"type": "function", "function": {"name": "f"}}
    choice = "auto" if given == ENDLESS else named
    for path, body, where in (
        ("chat/completions", messages | {"tool_choice": choice, "tools": [{"type": "function", "function": function}]},
         "tools[0].function.parameters"),
        ("responses", {"input": "x", "tools": [{"type": "function", **function}]}, "tools[0].parameters"),
        ("messages", messages | {"tools": [{"name": "f", "input_schema": given}]}, "tools[0].input_schema"),
    ):  # fmt: skip
        say(made, v31(("f", "{}")))
        answer = await made.direct.post(f"/v1/{path}", json=body)
        if wanted is None:
            assert answer.status_code == 400 and where in answer.json()["error"]["message"], answer.text
            continue
        assert answer.status_code == 200 and f"Parameters: {json.dumps(wanted)}" in prompt_of(made), answer.text
        if body.get("tool_choice") == named:
            grammar = grammar_of(made)
            assert not any(allowed(folder, grammar, v31(("f", text))) for text in ("777", "null", "[]"))
