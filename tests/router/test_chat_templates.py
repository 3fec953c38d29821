"""Prompts that templates make of requests, written out. DeepSeek V3.2 publishes no template: its one is ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from millrace_router.apis.anthropic.types import MessagesRequest
from millrace_router.apis.openai.chat import ChatRequest, Conversation
from millrace_router.apis.openai.responses_request import ResponsesRequest
from millrace_router.text.markers import DEEPSEEK, DSML, KIMI, THINK, THINK_END
from millrace_router.text.tokenizer import Tokenizer
from millrace_rpc.errors import MillraceError
from router.harness import BOS, EOS, TEMPLATE, write_tokenizer

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
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("v32"), None, (THINK, THINK_END, *DEEPSEEK, DSML)))


def prompt(tokenizer: Tokenizer, *messages: dict[str, Any], thinking: bool = False, tools: Sequence[Any] = ()) -> str:
    asked = Conversation.model_validate({"messages": list(messages), "tools": list(tools)}).as_chat()
    return tokenizer.render(asked.messages, asked.tools, {"thinking": thinking})


@pytest.mark.parametrize("thinking", [False, True])
def test_v32_turns(thinking: bool, v32: Tokenizer) -> None:
    mark = THINK if thinking else THINK_END
    assert prompt(v32, USER, thinking=thinking) == f"{BOS}{ASKED}{mark}"
    assert prompt(v32, SYSTEM, USER, thinking=thinking) == f"{BOS}Be brief.{ASKED}{mark}"
    earlier = f"{BOS}{ASKED}{THINK_END}Sunny.{EOS}"
    assert prompt(v32, USER, SAID, AGAIN, thinking=thinking) == f"{earlier}{ASKED_AGAIN}{mark}"


def test_v32_tools(v32: Tokenizer) -> None:
    assert prompt(v32, USER, tools=(TOOL,)) == f"{BOS}{DECLARED}{ASKED}{THINK_END}"
    assert prompt(v32, SYSTEM, USER, tools=(TOOL,)) == f"{BOS}Be brief.{DECLARED}{ASKED}{THINK_END}"
    assert prompt(v32, USER, CALLS, *RESULTS) == f"{BOS}{ASKED}{THINK_END}{CALLED}{TOLD}{THINK_END}"


def test_a_tool_without_a_description_is_shown_without_one(v32: Tokenizer) -> None:
    about = {name: value for name, value in TOOL["function"].items() if name != "description"}
    shown = prompt(v32, USER, tools=({"type": "function", "function": about},))
    assert f"<functions>\n{json.dumps(about)}\n</functions>" in shown


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


def test_thoughts_and_calls_of_every_api(v32: Tokenizer) -> None:
    call = {"name": "weather", "arguments": '{"days": 2}'}
    chat = ChatRequest.model_validate({"messages": [
        USER, {"role": "assistant", "reasoning_content": "I ask.", "tool_calls": [{"id": "a", "function": call}]},
        RESULTS[0],
    ]})  # fmt: skip
    responses = ResponsesRequest.model_validate({"input": [
        USER, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I ask."}]},
        {"type": "function_call", "call_id": "a", **call},
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
    ]})  # fmt: skip
    messages = MessagesRequest.model_validate({"max_tokens": 9, "messages": [
        USER, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I ask.", "signature": ""},
            {"type": "tool_use", "id": "a", "name": "weather", "input": {"days": 2}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "sunny"}]},
    ]})  # fmt: skip
    asked = [request.as_chat() for request in (chat, responses, messages)]
    one, two, three = [v32.render(each.messages, (), {"thinking": True}) for each in asked]
    assert one == two == three and f"{THINK}I ask.{THINK_END}\n\n<{DSML}function_calls>" in one


def test_v32_thoughts_stay_behind_the_last_question(v32: Tokenizer) -> None:
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


def test_a_template_of_the_folder_goes_first(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, None, (DSML,))
    (folder / "chat_template.jinja").write_text("mine")
    assert prompt(Tokenizer.load(folder), USER) == "mine"


CALL_ALONE = {**CALLS, "tool_calls": [{"id": "functions.weather:0", "function": {"name": "weather"}}]}
RESULT = {"role": "tool", "tool_call_id": "functions.weather:0", "content": "sunny"}
AGENT = SYSTEM, USER, CALL_ALONE, RESULT
LATER = *AGENT, SAID, AGAIN
TWO = SYSTEM, USER, {**CALLS, "content": "Wait."}, *RESULTS
ARGUMENTS = CALLS["tool_calls"][0]["function"]["arguments"]
USER_MARK, ASSISTANT, SEP = "<｜User｜>", "<｜Assistant｜>", DEEPSEEK.sep


def of_form(template: str, folder: Path, *markers: str) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(folder, template, (THINK, THINK_END, *markers)))


def v3_calls(*arguments: str) -> str:
    """Calls of one function, as V3 and R1 write them."""
    calls = (f"{DEEPSEEK.call}function{SEP}weather\n```json\n{text}\n```{DEEPSEEK.call_end}" for text in arguments)
    return DEEPSEEK.calls + "\n".join(calls) + DEEPSEEK.calls_end


def v3_results(*results: str, between: str = "") -> str:
    told = between.join(f"<｜tool▁output▁begin｜>{result}<｜tool▁output▁end｜>" for result in results)
    return f"<｜tool▁outputs▁begin｜>{told}<｜tool▁outputs▁end｜>"


def test_r1(tmp_path: Path) -> None:
    made = of_form(templates.R1, tmp_path, *DEEPSEEK)
    asked = f"{BOS}Be brief.{USER_MARK}Weather?{ASSISTANT}"
    assert prompt(made, SYSTEM, USER) == f"{asked}<think>\n"
    second = f"{asked}Sunny.{EOS}{USER_MARK}Really?{ASSISTANT}<think>\n"
    assert prompt(made, SYSTEM, USER, SAID, AGAIN) == second
    begun = f"{asked}{v3_calls('{}')}{EOS}{v3_results('sunny')}"
    assert prompt(made, *AGENT) == begun
    assert prompt(made, *LATER) == f"{begun}Sunny.{EOS}{USER_MARK}Really?{ASSISTANT}<think>\n"
    assert prompt(made, *TWO) == f"{asked}Wait.{v3_calls(ARGUMENTS, '{}')}{EOS}{v3_results('sunny', 'snow')}"


def test_r1_as_it_came_first(tmp_path: Path) -> None:
    """It would take an empty text for an answer without calls."""
    made = of_form(templates.R1_FIRST, tmp_path, *DEEPSEEK)
    calls = f"{ASSISTANT}{v3_calls('{}')}{EOS}"
    assert prompt(made, *AGENT) == f"{BOS}Be brief.{USER_MARK}Weather?{calls}{v3_results('sunny')}"


@pytest.mark.parametrize("form", ["V3_0324", "R1_0528"])
def test_v3_0324_and_r1_0528(form: str, tmp_path: Path) -> None:
    made = of_form(getattr(templates, form), tmp_path, *DEEPSEEK)
    asked = f"{BOS}Be brief.{USER_MARK}Weather?{ASSISTANT}"
    assert prompt(made, SYSTEM, USER) == asked
    assert prompt(made, SYSTEM, USER, SAID, AGAIN) == f"{asked}Sunny.{EOS}{USER_MARK}Really?{ASSISTANT}"
    begun = f"{asked}{v3_calls('{}')}{EOS}{v3_results('sunny')}"
    assert prompt(made, *AGENT) == begun
    assert prompt(made, *LATER) == f"{begun}Sunny.{EOS}{USER_MARK}Really?{ASSISTANT}"
    told = v3_results("sunny", "snow", between="\n")
    assert prompt(made, *TWO) == f"{asked}Wait.{v3_calls(ARGUMENTS, '{}')}{EOS}{told}"


@pytest.mark.parametrize("thinking", [False, True])
def test_v31(thinking: bool, tmp_path: Path) -> None:
    made = of_form(templates.V31, tmp_path, *DEEPSEEK)
    mark = THINK if thinking else THINK_END
    asked = f"{BOS}Be brief.{USER_MARK}Weather?{ASSISTANT}"
    assert prompt(made, SYSTEM, USER, thinking=thinking) == f"{asked}{mark}"
    again = f"Sunny.{EOS}{USER_MARK}Really?{ASSISTANT}{mark}"
    assert prompt(made, SYSTEM, USER, SAID, AGAIN, thinking=thinking) == f"{asked}{THINK_END}{again}"
    call = f"{DEEPSEEK.call}weather{SEP}{{}}{DEEPSEEK.call_end}"
    told = "<｜tool▁output▁begin｜>sunny<｜tool▁output▁end｜>"
    begun = f"{asked}{THINK_END}{DEEPSEEK.calls}{call}{DEEPSEEK.calls_end}{EOS}{told}"
    assert prompt(made, *AGENT, thinking=thinking) == begun
    assert prompt(made, *LATER, thinking=thinking) == f"{begun}{again}"
    first = f"{DEEPSEEK.call}weather{SEP}{ARGUMENTS}{DEEPSEEK.call_end}"
    two = f"{asked}{THINK_END}Wait.{DEEPSEEK.calls}{first}{call}{DEEPSEEK.calls_end}{EOS}{told}"
    assert prompt(made, *TWO, thinking=thinking) == f"{two}<｜tool▁output▁begin｜>snow<｜tool▁output▁end｜>"


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
def test_kimi(form: str, agent: str, later: str, tmp_path: Path) -> None:
    """`agent`: thoughts before a call that still has no answer. `later`: those of all before an answer."""
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
