"""Prompts that templates make of requests, written out. DeepSeek V3.2 publishes no template: its one is ours."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from millrace.v1 import common_pb2
from millrace_router.apis.anthropic.types import MessagesRequest
from millrace_router.apis.openai.chat import ChatRequest, Conversation
from millrace_router.apis.openai.responses_request import ResponsesRequest
from millrace_router.text.chat_format import Style
from millrace_router.text.markers import DEEPSEEK, DSML, KIMI, THINK, THINK_END
from millrace_router.text.tokenizer import Tokenizer
from millrace_rpc.errors import MillraceError
from router.harness import BOS, EOS, TEMPLATE, Cluster, write_tokenizer
from router.scripted import HELLO, TOOLS, prompt_of, say
from router.text.test_parsers import FORMS, WEATHER

from router import templates

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}
AGAIN = {"role": "user", "content": "Really?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLS = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "I ask.",
    "tool_calls": [
        {"id": "a", "function": {"name": "weather", "arguments": '{"city": "Zürich \\"A\\"", "days": [1, 2]}'}},
        {"id": "b", "function": {"name": "weather"}},
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    {"role": "tool", "tool_call_id": "b", "content": "snow"},
]
SAID = {"role": "assistant", "content": "Sunny.", "reasoning_content": "It says so."}

DECLARED = f"""

## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}function_calls>" block like the following as part of your reply to the \
user:
<{DSML}function_calls>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:
<{DSML}function_calls>
...
</{DSML}function_calls>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
{json.dumps(TOOL["function"])}
</functions>
"""
CALLED = f"""

<{DSML}function_calls>
<{DSML}invoke name="weather">
<{DSML}parameter name="city" string="true">Zürich "A"</{DSML}parameter>
<{DSML}parameter name="days" string="false">[1, 2]</{DSML}parameter>
</{DSML}invoke>
<{DSML}invoke name="weather">

</{DSML}invoke>
</{DSML}function_calls>{EOS}"""
TOLD = "\n\n<function_results>\n<result>sunny</result>\n<result>snow</result>\n</function_results>\n\n"
ASKED, ASKED_AGAIN = "<｜User｜>Weather?<｜Assistant｜>", "<｜User｜>Really?<｜Assistant｜>"


@pytest.fixture(scope="module")
def v32(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return of_form(None, tmp_path_factory.mktemp("v32"), *DEEPSEEK, DSML)


def prompt(tokenizer: Tokenizer, *messages: dict[str, Any], thinking: bool = False, tools: Sequence[Any] = ()) -> str:
    asked = Conversation.model_validate({"messages": list(messages), "tools": list(tools)}).as_chat()
    return tokenizer.render(asked.messages, asked.tools, {"thinking": thinking})


@pytest.mark.parametrize("thinking", [False, True])
def test_v32_shows_turns_and_where_reasoning_begins(thinking: bool, v32: Tokenizer) -> None:
    mark = THINK if thinking else THINK_END
    assert prompt(v32, USER, thinking=thinking) == f"{BOS}{ASKED}{mark}"
    assert prompt(v32, SYSTEM, USER, thinking=thinking) == f"{BOS}Be brief.{ASKED}{mark}"
    earlier = f"{BOS}{ASKED}{THINK_END}Sunny.{EOS}"
    assert prompt(v32, USER, SAID, AGAIN, thinking=thinking) == f"{earlier}{ASKED_AGAIN}{mark}"


def test_v32_shows_tools_calls_and_results(v32: Tokenizer) -> None:
    assert prompt(v32, USER, tools=(TOOL,)) == f"{BOS}{DECLARED}{ASKED}{THINK_END}"
    assert prompt(v32, SYSTEM, USER, tools=(TOOL,)) == f"{BOS}Be brief.{DECLARED}{ASKED}{THINK_END}"
    assert prompt(v32, USER, CALLS, *RESULTS) == f"{BOS}{ASKED}{THINK_END}{CALLED}{TOLD}{THINK_END}"


def test_v32_shows_the_form_of_the_answer(v32: Tokenizer) -> None:
    """Of every API; a grammar holds the model to it anyway."""
    schema = TOOL["function"]["parameters"]
    words = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
    wanted = f"{BOS}Be brief.{words}{json.dumps(schema)}{ASKED}{THINK_END}"
    chat = {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}}
    responses = {"text": {"format": {"type": "json_schema", "name": "place", "schema": schema}}}
    messages = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    for request in (
        ChatRequest.model_validate({"messages": [SYSTEM, USER], **chat}),
        ResponsesRequest.model_validate({"instructions": "Be brief.", "input": "Weather?", **responses}),
        MessagesRequest.model_validate({"max_tokens": 9, "system": "Be brief.", "messages": [USER], **messages}),
    ):
        asked = request.as_chat()
        assert v32.render(asked.messages, asked.tools, asked.arguments) == wanted
    any_json = ChatRequest.model_validate({"messages": [USER], "response_format": {"type": "json_object"}}).as_chat()
    shown = v32.render(any_json.messages, any_json.tools, any_json.arguments)
    assert shown == f'{BOS}{words}{{"type": "json_object"}}{ASKED}{THINK_END}'


def test_v32_reasoning_stays_behind_the_last_question(v32: Tokenizer) -> None:
    agent = USER, CALLS, *RESULTS
    thought = f"{BOS}{ASKED}{THINK}I ask.{THINK_END}{CALLED}{TOLD}{THINK}"
    assert prompt(v32, *agent, thinking=True) == thought
    one_more = prompt(v32, *agent, {**SAID, "tool_calls": CALLS["tool_calls"]}, *RESULTS, thinking=True)
    assert one_more == f"{thought}It says so.{THINK_END}Sunny.{CALLED}{TOLD}{THINK}"
    later = f"{BOS}{ASKED}{THINK_END}{CALLED}{TOLD}{THINK_END}Sunny.{EOS}{ASKED_AGAIN}{THINK}"
    assert prompt(v32, *agent, SAID, AGAIN, thinking=True) == later


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ((RESULTS[0],), "stands behind no call"),
        ((USER, RESULTS[0]), "stands behind no call"),
        (({"role": "critic", "content": "x"},), "the role critic is unknown"),
    ],
)
def test_what_v32_refuses(messages: tuple[dict[str, Any], ...], words: str, v32: Tokenizer) -> None:
    with pytest.raises(MillraceError, match=words) as refusal:
        prompt(v32, *messages)
    assert refusal.value.param == "messages"


CALL_ALONE = {**CALLS, "tool_calls": [{"id": "functions.weather:0", "function": {"name": "weather"}}]}
RESULT = {"role": "tool", "tool_call_id": "functions.weather:0", "content": "sunny"}
AGENT = SYSTEM, USER, CALL_ALONE, RESULT
LATER = *AGENT, SAID, AGAIN
TWO = SYSTEM, USER, {**CALLS, "content": "Wait."}, *RESULTS
ARGUMENTS = CALLS["tool_calls"][0]["function"]["arguments"]
USER_MARK, ASSISTANT, SEP = "<｜User｜>", "<｜Assistant｜>", DEEPSEEK.sep


def of_form(template: str | None, folder: Path, *markers: str) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(folder, template, (THINK, THINK_END, *markers)))


class Form(NamedTuple):
    """How a template shows turns: behind the last question, behind an earlier one, calls, and results."""

    template: str
    last: str
    earlier: str
    calls: Callable[..., str]
    results: Callable[..., str]


def v3_calls(*arguments: str) -> str:
    calls = (f"{DEEPSEEK.call}function{SEP}weather\n```json\n{text}\n```{DEEPSEEK.call_end}" for text in arguments)
    return DEEPSEEK.calls + "\n".join(calls) + DEEPSEEK.calls_end


def v31_calls(*arguments: str) -> str:
    calls = (f"{DEEPSEEK.call}weather{SEP}{text}{DEEPSEEK.call_end}" for text in arguments)
    return DEEPSEEK.calls + "".join(calls) + DEEPSEEK.calls_end


def v31_results(*told: str, between: str = "") -> str:
    return between.join(f"<｜tool▁output▁begin｜>{result}<｜tool▁output▁end｜>" for result in told)


def v3_results(*told: str, between: str = "") -> str:
    return f"<｜tool▁outputs▁begin｜>{v31_results(*told, between=between)}<｜tool▁outputs▁end｜>"


LINES = functools.partial(v3_results, between="\n")
DEEPSEEKS = {
    "R1": Form(templates.R1, "<think>\n", "", v3_calls, v3_results),
    "V3_0324": Form(templates.V3_0324, "", "", v3_calls, LINES),
    "R1_0528": Form(templates.R1_0528, "", "", v3_calls, LINES),
    "V31": Form(templates.V31, THINK_END, THINK_END, v31_calls, v31_results),
    "V31, thinking": Form(templates.V31, THINK, THINK_END, v31_calls, v31_results),
}


@pytest.mark.parametrize("name", DEEPSEEKS)
def test_a_conversation_is_shown_as_the_model_knows_it(name: str, tmp_path: Path) -> None:
    form = DEEPSEEKS[name]
    shown = functools.partial(prompt, of_form(form.template, tmp_path, *DEEPSEEK), thinking="thinking" in name)
    asked = f"{BOS}Be brief.{USER_MARK}Weather?{ASSISTANT}"
    again = f"Sunny.{EOS}{USER_MARK}Really?{ASSISTANT}{form.last}"
    begun = f"{asked}{form.earlier}{form.calls('{}')}{EOS}{form.results('sunny')}"
    assert shown(SYSTEM, USER) == f"{asked}{form.last}"
    assert shown(SYSTEM, USER, SAID, AGAIN) == f"{asked}{form.earlier}{again}"
    assert shown(*AGENT) == begun and shown(*LATER) == f"{begun}{again}"
    two = f"{asked}{form.earlier}Wait.{form.calls(ARGUMENTS, '{}')}{EOS}{form.results('sunny', 'snow')}"
    assert shown(*TWO) == two


V3_CALL = f"function{SEP}tool_call_name\n```json\ntool_call_arguments\n```"
V32_CALLS = f"""<{DSML}function_calls>
<{DSML}invoke name="tool_call_name">
<{DSML}parameter name="parameter_name" string="true|false">parameter_value</{DSML}parameter>
</{DSML}invoke>
{{additional_tool_calls}}
</{DSML}function_calls>"""


@pytest.mark.parametrize(
    ("template", "marker", "calls"),
    [
        (templates.R1, "", f"{V3_CALL}{DEEPSEEK.call_end}\n"),
        (templates.V3_0324, "", f"{V3_CALL}{DEEPSEEK.call_end}\n"),
        (templates.V31, "", f"tool_call_name{SEP}tool_call_arguments{DEEPSEEK.call_end}"),
        (TEMPLATE, DSML, V32_CALLS),
    ],
)
def test_tools_that_a_template_does_not_take(template: str, marker: str, calls: str, tmp_path: Path) -> None:
    """The words of V3.1's model card, with the model's own form of calls."""
    made = of_form(template, tmp_path, *DEEPSEEK, *([marker] if marker else []))
    if not marker:
        calls = f"{DEEPSEEK.calls}{DEEPSEEK.call}{calls}{{additional_tool_calls}}{DEEPSEEK.calls_end}"
    described = f"""## Tools
You have access to the following tools:

### weather
Description: Of a city.

Parameters: {json.dumps(TOOL["function"]["parameters"])}

IMPORTANT: ALWAYS adhere to this exact format for tool use:
{calls}

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces"""
    assert prompt(made, SYSTEM, USER, tools=(TOOL,)).startswith(f"{BOS}Be brief.\n\n{described}{USER_MARK}Weather?")
    assert prompt(made, USER, tools=(TOOL,)).startswith(f"{BOS}{described}{USER_MARK}Weather?")


def kimi(kind: str, name: str, text: str) -> str:
    return f"<|im_{kind}|>{name}<|im_middle|>{text}<|im_end|>"


@pytest.mark.parametrize(
    ("form", "agent", "later"),
    [
        ("KIMI_FIRST", "", ""),
        ("KIMI_K2", "", ""),
        ("KIMI_THINKING", "<think>I ask.</think>", "<think></think>"),
    ],
)
def test_kimi_shows_turns_calls_and_reasoning(form: str, agent: str, later: str, tmp_path: Path) -> None:
    """`agent`: reasoning before a call that still has no answer. `later`: those of all before an answer."""
    made = of_form(getattr(templates, form), tmp_path, *KIMI)
    turn = "<|im_assistant|>assistant<|im_middle|>"
    user = kimi("user", "user", "Weather?")
    asked = kimi("system", "system", "Be brief.") + user
    again = f"{kimi('assistant', 'assistant', f'{later}Sunny.')}{kimi('user', 'user', 'Really?')}{turn}"
    assert prompt(made, SYSTEM, USER) == f"{asked}{turn}"
    assert prompt(made, SYSTEM, USER, SAID, AGAIN) == f"{asked}{again}"
    default = kimi("system", "system", "You are Kimi, an AI assistant created by Moonshot AI.")
    assert prompt(made, USER) == f"{default}{user}{turn}"
    tools = kimi("system", "tool_declare", json.dumps([TOOL], separators=(",", ":")))
    call = f"{KIMI.calls}{KIMI.call}functions.weather:0{KIMI.sep}{{}}{KIMI.call_end}{KIMI.calls_end}"
    told = kimi("system", "tool", "## Return of functions.weather:0\nsunny")
    begun = kimi("assistant", "assistant", f"{agent}{call}") + told
    assert prompt(made, *AGENT, tools=(TOOL,)) == f"{tools}{asked}{begun}{turn}"
    assert prompt(made, *LATER) == f"{asked}{kimi('assistant', 'assistant', f'{later}{call}')}{told}{again}"


def test_kimi_shows_names(tmp_path: Path) -> None:
    made = of_form(templates.KIMI_K2, tmp_path, *KIMI)
    messages = SYSTEM, {**USER, "name": "Ann"}, CALL_ALONE, {**RESULT, "name": "weather"}
    shown = prompt(made, *messages)
    assert kimi("user", "Ann", "Weather?") in shown
    assert kimi("system", "weather", "## Return of functions.weather:0\nsunny") in shown


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{% for m in messages %}{{ m.content }}|{% endfor %}", "Weather?||sunny|"),  # writes None otherwise
        (
            "{% for m in messages %}{{ 'none' if m.content is none else m.content }}|{% endfor %}",
            "Weather?|none|sunny|",
        ),
        ("{{ messages[1].content + '' if messages[1:] }}|{{ messages | length }}", "|3"),  # fails otherwise
    ],
)
def test_calls_without_a_text(template: str, shown: str, tmp_path: Path) -> None:
    made = of_form(template, tmp_path, *DEEPSEEK)
    assert prompt(made, USER, CALL_ALONE, RESULT) == shown
    assert prompt(made, USER, {**CALL_ALONE, "content": ""}, RESULT) == shown


# ------------------------------------------------------------------------------------- calls of earlier turns


TEXTS = {
    name: getattr(templates, name)
    for name in ("R1", "R1_FIRST", "V3_0324", "R1_0528", "V31", "KIMI_K2", "KIMI_FIRST", "KIMI_THINKING")
}
EACH_CALL = (
    "{% for m in messages %}{% for c in m.tool_calls or () %}<CALL>{% endfor %}{{ m.content or '' }}{% endfor %}"
)
OBJECTS = {  # templates that read an object
    "V32": None,
    "items": EACH_CALL.replace("<CALL>", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"),
    "tojson": EACH_CALL.replace("<CALL>", "{{ c.function.arguments | tojson }}"),
}
EITHER = EACH_CALL.replace(
    "<CALL>", "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
)
BROKEN = ["{", '{"city": "Os', "[]", "777", '"{}"', "Oslo", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": 1} so']


def shown(tokenizer: Tokenizer, arguments: Any) -> str:
    """The prompt after a call with these arguments."""
    call = {"id": "functions.weather:0", "function": {"name": "weather", "arguments": arguments}}
    turns = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
        {"role": "user", "content": "Really?"},
    ]
    return tokenizer.render(Conversation.model_validate({"messages": turns}).as_chat().messages)


@pytest.mark.parametrize("name", [*TEXTS, *OBJECTS])
def test_arguments_that_no_tool_takes_are_shown(name: str, tmp_path: Path) -> None:
    tokenizer = of_form(TEXTS.get(name) or OBJECTS[name], tmp_path, *DEEPSEEK, DSML)
    for arguments in BROKEN:
        prompt = shown(tokenizer, arguments)
        assert "Really?" in prompt
        if name in TEXTS:
            assert arguments in prompt, "as they were sent"
        elif name == "V32":
            line = f'<{DSML}parameter name="INVALID_JSON" string="true">{arguments}</{DSML}parameter>'
            assert line in prompt
        elif name == "items":
            assert f"INVALID_JSON={arguments};" in prompt
        else:
            assert json.dumps({"INVALID_JSON": arguments}) in prompt


@pytest.mark.parametrize("template", [*TEXTS.values(), *OBJECTS.values(), EITHER])
def test_none_are_an_empty_object(template: str | None, tmp_path: Path) -> None:
    tokenizer = of_form(template, tmp_path, *DEEPSEEK, DSML)
    (prompt,) = {shown(tokenizer, arguments) for arguments in ("", " ", "null", None, {}, "{}")}
    assert "INVALID_JSON" not in prompt


@pytest.mark.parametrize("template", [*TEXTS.values(), *OBJECTS.values(), EITHER])
def test_an_object_and_its_text_are_shown_alike(template: str | None, tmp_path: Path) -> None:
    arguments = {"city": "Zürich", "days": [1, 2]}
    text = json.dumps(arguments, ensure_ascii=False)
    tokenizer = of_form(template, tmp_path, *DEEPSEEK, DSML)
    prompt = shown(tokenizer, arguments)
    assert prompt == shown(tokenizer, text) and "Zürich" in prompt
    assert r"\"city\"" not in prompt, "not quoted twice"


@pytest.mark.parametrize("style", Style)
async def test_a_call_that_was_cut_off_goes_back(serve: Callable, style: Style) -> None:
    """In all APIs, at any place: the next turn gets its answer."""
    made = await serve(style.name.lower())
    written = FORMS[style](("weather", WEATHER))
    for at in range(len(written) - len(WEATHER) - 20, len(written), 17):
        for goes_back in (chat, responses, messages):
            say(made, written[:at], finish=common_pb2.FINISH_REASON_LENGTH)
            path, body = await goes_back(made)
            say(made, "Done.")
            answer = await made.direct.post(path, json=body)
            assert answer.status_code == 200, (at, answer.text)
            assert "Done." in answer.text and "sunny" in prompt_of(made)


async def chat(made: Cluster) -> tuple[str, dict[str, Any]]:
    body = {"messages": HELLO, "tools": TOOLS}
    message = (await made.direct.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    calls = message.get("tool_calls", ())
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls]
    return "/v1/chat/completions", body | {"messages": [*HELLO, message, *(results or [user("sunny")])]}


async def responses(made: Cluster) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"input": HELLO, "tools": tools}
    output = (await made.direct.post("/v1/responses", json=body)).json()["output"]
    calls = [item["call_id"] for item in output if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call, "output": "sunny"} for call in calls]
    return "/v1/responses", body | {"input": [*HELLO, *output, *(results or [user("sunny")])]}


async def messages(made: Cluster) -> tuple[str, dict[str, Any]]:
    tools = [{"name": tool["function"]["name"], "input_schema": {}} for tool in TOOLS]
    body = {"messages": HELLO, "tools": tools, "max_tokens": 999}
    content = (await made.direct.post("/v1/messages", json=body)).json()["content"]
    calls = [block["id"] for block in content if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call, "content": "sunny"} for call in calls]
    said = [{"role": "assistant", "content": content}, user(results) if results else user("sunny")]
    return "/v1/messages", body | {"messages": [*HELLO, *said]}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_ids_of_other_servers_become_those_of_kimi(tmp_path: Path) -> None:
    """A model writes what it is shown: without a name in the id, it would write calls without names."""
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, templates.KIMI_K2, KIMI))

    def turn(*calls: tuple[str, str]) -> list[dict[str, Any]]:
        made = [{"id": call_id, "function": {"name": name}} for name, call_id in calls]
        results = [{"role": "tool", "tool_call_id": call_id, "content": "x"} for _, call_id in calls]
        return [{"role": "assistant", "tool_calls": made}, *results]

    def ids(*turns: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
        chat = Conversation.model_validate(
            {"messages": [user("?"), *(each for some in turns for each in some)]}
        ).as_chat()
        prompt = tokenizer.render(chat.messages)
        heads = [part.partition(KIMI.sep)[0] for part in prompt.split(KIMI.call)[1:]]
        return heads, [part.partition("\n")[0] for part in prompt.split("## Return of ")[1:]]

    own = "functions.time:0", "functions.weather:1"
    assert ids(turn(("time", own[0])), turn(("weather", own[1]))) == ([*own], [*own])
    assert ids(turn(("time", "call_a"), ("weather", "call_b"))) == ([*own], [*own])
    assert ids(turn(("time", own[0])), turn(("time", own[0]))) == (["functions.time:0", "functions.time:1"],) * 2
    assert ids(turn(("time", "functions.weather:0"))) == (["functions.time:0"],) * 2
    assert ids(*[turn(("time", "call_1"))] * 4) == ([f"functions.time:{i}" for i in range(4)],) * 2
    far = [turn(("time", f"functions.time:{i}")) for i in range(2, 900)]  # each later call must not begin at the first
    assert len({*ids(*far, *[turn(("time", "call_1"))] * 900)[0]}) == len(far) + 900
