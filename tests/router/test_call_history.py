"""Calls of earlier turns as templates show them: none that a server has returned makes a conversation a 400."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from millrace.v1 import common_pb2
from millrace_router.apis.openai.chat import Conversation
from millrace_router.text.chat_format import Style
from millrace_router.text.markers import DEEPSEEK, DSML, KIMI, THINK, THINK_END
from millrace_router.text.tokenizer import Tokenizer
from router.harness import Cluster, write_tokenizer
from router.scripted import HELLO, TOOLS, prompt_of, say
from router.test_parsers import FORMS, WEATHER

from router import templates

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


def of_template(folder: Path, template: str | None) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(folder, template, (THINK, THINK_END, *DEEPSEEK, DSML)))


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
    tokenizer = of_template(tmp_path, TEXTS.get(name) or OBJECTS[name])
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
    tokenizer = of_template(tmp_path, template)
    (prompt,) = {shown(tokenizer, arguments) for arguments in ("", " ", "null", None, {}, "{}")}
    assert "INVALID_JSON" not in prompt


@pytest.mark.parametrize("template", [*TEXTS.values(), *OBJECTS.values(), EITHER])
def test_an_object_and_its_text_are_shown_alike(template: str | None, tmp_path: Path) -> None:
    arguments = {"city": "Zürich", "days": [1, 2]}
    text = json.dumps(arguments, ensure_ascii=False)
    tokenizer = of_template(tmp_path, template)
    prompt = shown(tokenizer, arguments)
    assert prompt == shown(tokenizer, text) and "Zürich" in prompt
    assert r"\"city\"" not in prompt, "not quoted twice"


@pytest.mark.parametrize("style", Style)
async def test_a_call_that_was_cut_off_goes_back(serve: Callable, style: Style) -> None:
    """In all APIs, at any place: the next turn gets its answer."""
    made = await serve(style.name.lower())
    written = FORMS[style](("weather", WEATHER))
    for at in range(len(written) - len(WEATHER) - 20, len(written), 7):
        for goes_back in (chat, responses, messages):
            say(made, written[:at], finish=common_pb2.FINISH_REASON_LENGTH)
            path, body = await goes_back(made)
            say(made, "Done.")
            answer = await made.http.post(path, json=body)
            assert answer.status_code == 200, (at, answer.text)
            assert "Done." in answer.text and "sunny" in prompt_of(made)


async def chat(made: Cluster) -> tuple[str, dict[str, Any]]:
    body = {"messages": HELLO, "tools": TOOLS}
    message = (await made.http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    calls = message.get("tool_calls", ())
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls]
    return "/v1/chat/completions", body | {"messages": [*HELLO, message, *(results or [user("sunny")])]}


async def responses(made: Cluster) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"input": HELLO, "tools": tools}
    output = (await made.http.post("/v1/responses", json=body)).json()["output"]
    calls = [item["call_id"] for item in output if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call, "output": "sunny"} for call in calls]
    return "/v1/responses", body | {"input": [*HELLO, *output, *(results or [user("sunny")])]}


async def messages(made: Cluster) -> tuple[str, dict[str, Any]]:
    tools = [{"name": tool["function"]["name"], "input_schema": {}} for tool in TOOLS]
    body = {"messages": HELLO, "tools": tools, "max_tokens": 999}
    content = (await made.http.post("/v1/messages", json=body)).json()["content"]
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
