"""What coding agents send: tools that no model here can call, and the items and blocks that go back with results."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from router.fake_worker import CONTEXT
from router.harness import Cluster, events
from router.scripted import HELLO, SCHEMA, prompt_of, say
from router.text.test_parsers import v32

WEB = {"type": "web_search", "external_web_access": False}
OPENAI = [  # types of tools that OpenAI's clients know beside functions
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search", "image_generation",
    "local_shell", "mcp", "namespace", "programmatic_tool_calling", "shell", "tool_search", "web_search",
    "web_search_preview", "web_search_2025_08_26",
]  # fmt: skip
ANTHROPIC = [
    "advisor_20260301", "bash_20250124", "code_execution_20250825", "computer_20250124", "mcp_toolset",
    "memory_20250818", "text_editor_20250728", "tool_search_tool_regex_20251119", "web_fetch_20250910",
    "web_search_20250305",
]  # fmt: skip
CHAT = {"messages": HELLO, "max_tokens": 99}
APIS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {  # path: (request, function, other types)
    "/v1/chat/completions": (CHAT, {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}, OPENAI),
    "/v1/responses": ({"input": HELLO}, {"type": "function", "name": "f", "parameters": SCHEMA}, OPENAI),
    "/v1/messages": (CHAT, {"name": "f", "input_schema": SCHEMA}, ANTHROPIC),
}


def texts(told: Any) -> list[str]:
    """Every text in an answer of any API."""
    if isinstance(told, dict):
        own = [told[key] for key in ("text", "content") if isinstance(told.get(key), str)]
        return own + [text for value in told.values() for text in texts(value)]
    return [text for value in told for text in texts(value)] if isinstance(told, list) else []


@pytest.mark.parametrize("path", APIS)
async def test_tools_that_are_no_functions_are_left_out_and_named(path: str, serve: Callable) -> None:
    """The prompt is the same as without them, whatever else they have."""
    made = await serve("takes")
    body, function, kinds = APIS[path]
    others = [{"type": kind, "name": kind, "nested": {"a": [None, 1]}} for kind in kinds]
    named = {f"tools[{i + i // 2 + 1}]": kind for i, kind in enumerate(kinds)}  # a function, two others, …
    mixed = [tool for i in range(0, len(others), 2) for tool in (named_function(function, i), *others[i : i + 2])]
    alone = [named_function(function, i) for i in range(0, len(others), 2)]
    prompts = []
    for tools, ignored in ((mixed, named), (alone, None)):
        say(made, "Done.")
        answer = await made.direct.post(path, json=body | {"tools": tools})
        assert answer.status_code == 200, answer.text
        assert answer.json().get("ignored") == ignored and "Done." in texts(answer.json())
        if path == "/v1/responses":
            assert [tool["name"] for tool in answer.json()["tools"]] == [f"f{i}" for i in range(0, len(others), 2)]
        prompts.append(prompt_of(made))
        say(made, "Done.")
        streamed = events((await made.direct.post(path, json=body | {"tools": tools, "stream": True})).text)
        first = streamed[0].get("response") or streamed[0].get("message") or streamed[0]
        assert first.get("ignored") == ignored
        if "chat" in path:
            assert not any("ignored" in event for event in streamed[1:])
    assert prompts[0] == prompts[1]
    say(made, "Done.")
    answer = await made.direct.post(path, json=body | {"tools": others})
    assert answer.status_code == 200 and len(answer.json()["ignored"]) == len(kinds)


def named_function(function: dict[str, Any], i: int) -> dict[str, Any]:
    if "function" in function:
        return function | {"function": function["function"] | {"name": f"f{i}"}}
    return function | {"name": f"f{i}"}


@pytest.mark.parametrize("path", APIS)
async def test_strict_tools_refuses_them(path: str, serve: Callable) -> None:
    made = await serve("v31", strict_tools=True)
    body, function, kinds = APIS[path]
    for kind in kinds:
        answer = await made.direct.post(path, json=body | {"tools": [function, {"type": kind, "name": "x"}]})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400
        assert message.startswith("tools[1].type") and repr(kind) in message and "strict_tools" in message
    if path == "/v1/messages":
        counted = {"messages": HELLO, "tools": [{"type": "bash_20250124", "name": "bash"}]}
        assert (await made.direct.post(f"{path}/count_tokens", json=counted)).status_code == 400
    say(made, "Done.")
    assert (await made.direct.post(path, json=body | {"tools": [function]})).status_code == 200
    assert len(made.prefills[0].submitted) == 1


CHOICES = {
    "/v1/chat/completions": [{"type": kind, kind: {"name": "custom"}} for kind in ("custom", "function")],
    "/v1/responses": [{"type": kind, "name": "custom"} for kind in ("custom", "function", "file_search", "mcp")],
    "/v1/messages": [{"type": "tool", "name": "web_search_20250305"}],
}


@pytest.mark.parametrize("path", APIS)
async def test_a_choice_of_a_tool_that_is_left_out_is_refused(path: str, serve: Callable) -> None:
    made = await serve("v31")
    body, function, kinds = APIS[path]
    others = [{"type": kind, "name": kind} for kind in kinds]
    for choice in CHOICES[path]:
        answer = await made.direct.post(path, json=body | {"tools": [function, *others], "tool_choice": choice})
        assert answer.status_code == 400 and "tool_choice" in answer.json()["error"]["message"], (choice, answer.text)
    required = {"type": "any"} if path == "/v1/messages" else "required"
    answer = await made.direct.post(path, json=body | {"tools": others, "tool_choice": required})
    assert answer.status_code == 400 and "there are no tools" in answer.json()["error"]["message"]
    assert not made.prefills[0].submitted


# ------------------------------------------------------------------------------------------------------------- Codex

STRING = {"type": "string"}
CODEX_TOOLS = [
    {
        "type": "function",
        "name": "exec_command",
        "description": "Runs a command.",
        "strict": False,
        "parameters": {"type": "object", "properties": {"cmd": STRING}, "required": ["cmd"],
                       "additionalProperties": False},
    },
    {"type": "function", "name": "update_plan", "description": "", "strict": False, "defer_loading": True,
     "parameters": {"type": "object", "properties": {"plan": {"type": "array", "items": STRING}}}},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch hunk+ end_patch"},
    },
    WEB,
    {"type": "namespace", "name": "mcp__docs", "description": "", "tools": [
        {"type": "function", "name": "find", "strict": False, "parameters": {"type": "object", "properties": {}}},
    ]},
    {"type": "image_generation", "output_format": "png"},
    {"type": "tool_search", "execution": "client", "description": "", "parameters": {"type": "object"}},
]  # fmt: skip


def text(role: str, said: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": said}]}


def codex(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": "tiny",
        "instructions": "You are a coding agent.",
        "input": items,
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "high", "summary": "auto", "context": "all_turns"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "service_tier": "priority",
        "prompt_cache_key": "019d-thread",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "1", "session_id": "2", "thread_id": "3"},
    }


HEADERS = {
    "originator": "codex_exec", "version": "0.145.0", "session-id": "1", "thread-id": "1", "session_id": "1",
    "conversation_id": "1", "x-codex-turn-metadata": "{}", "accept": "text/event-stream",
    "user-agent": "codex_exec/0.145.0 (Debian 13; x86_64)",
}  # fmt: skip


async def test_codex_works_over_two_calls(serve: Callable) -> None:
    """Two turns with a call each. What is sent back has the fields that Codex keeps of the items."""
    made = await serve("v32")
    items = [
        text("developer", "<permissions>sandbox</permissions>"),
        text("user", "<environment_context>bash</environment_context>"),
        text("user", "List the files."),
    ]
    for turn, output in enumerate(("a.py", [{"type": "input_text", "text": "b.py"}])):
        say(made, "Hm.</think>I look." + v32(("exec_command", '{"cmd": "ls"}')))
        answer = await made.direct.post("/v1/responses", json=codex(items), headers=HEADERS)
        assert answer.status_code == 200, answer.text
        told = events(answer.text)
        assert {"response.created", "response.output_item.done", "response.completed"} <= {it["type"] for it in told}
        done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
        assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
        ended = told[-1]["response"]
        assert [tool["name"] for tool in ended["tools"]] == ["exec_command", "update_plan"]
        assert ended["ignored"] == {
            "tools[2]": "custom", "tools[3]": "web_search", "tools[4]": "namespace", "tools[5]": "image_generation",
            "tools[6]": "tool_search",
        }  # fmt: skip
        reasoning, said, call = done
        kept = {"summary": reasoning["summary"], "content": reasoning["content"] if turn else None}
        items += [
            {"type": "reasoning", **kept, "encrypted_content": None},
            text("assistant", said["content"][0]["text"], "output_text") | {"phase": "commentary"},
            {key: call[key] for key in ("type", "name", "arguments", "call_id")},
            {"type": "function_call_output", "call_id": call["call_id"], "output": output},
        ]
    say(made, "So.</think>Two files.")
    told = events((await made.direct.post("/v1/responses", json=codex(items), headers=HEADERS)).text)
    assert told[-1]["type"] == "response.completed" and "Two files." in texts(told[-1])
    prompt = prompt_of(made)
    assert prompt.index("coding agent") < prompt.index("List the files.") < prompt.index("a.py") < prompt.index("b.py")
    assert "apply_patch" not in prompt and "None" not in prompt


async def test_items_of_tools_that_other_models_called(serve: Callable) -> None:
    """A conversation that began elsewhere: the client's calls stay, what the vendor's servers did is left out."""
    made = await serve("takes")
    before = [text("user", "Fix it."), text("assistant", "I do.", "output_text")]
    hosted = [
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "file_search_call", "id": "fs_1", "queries": ["x"], "status": "completed", "results": None},
        {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "container_id": "c", "outputs": []},
        {"type": "image_generation_call", "id": "ig_1", "result": "aGk=", "status": "completed"},
        {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "x", "tools": []},
        {"type": "mcp_call", "id": "mcp_1", "server_label": "x", "name": "f", "arguments": "{}", "output": "y"},
        {"type": "tool_search_call", "call_id": "1", "execution": "client", "arguments": {}},
        {"type": "tool_search_output", "call_id": "1", "execution": "client", "tools": []},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
    ]
    called = [
        {"type": "custom_tool_call", "status": "completed", "call_id": "1", "name": "apply_patch", "input": "*** é"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "Patched"},
        {"type": "local_shell_call", "call_id": "2", "status": "completed",
         "action": {"type": "exec", "command": ["make", "test"], "timeout_ms": None, "env": {}}},
        {"type": "function_call_output", "call_id": "2", "output": "Tested"},
        {"type": "local_shell_call", "id": "3", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "3", "output": "Listed"},
        {"type": "custom_tool_call", "id": "c", "call_id": "4", "name": "exec", "input": ""},
        {"type": "custom_tool_call_output", "call_id": "4", "output": [{"type": "input_text", "text": "Nothing"}]},
    ]  # fmt: skip

    def call(number: str, name: str, **arguments: Any) -> dict[str, Any]:
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": number, "function": function}]}

    chat = [
        {"role": "user", "content": "Fix it."},
        call("1", "apply_patch", input="*** é") | {"content": "I do."},
        {"role": "tool", "tool_call_id": "1", "content": "Patched"},
        call("2", "local_shell", **called[2]["action"]),
        {"role": "tool", "tool_call_id": "2", "content": "Tested"},
        call("3", "local_shell", **called[4]["action"]),
        {"role": "tool", "tool_call_id": "3", "content": "Listed"},
        call("4", "exec", input=""),
        {"role": "tool", "tool_call_id": "4", "content": "Nothing"},
    ]
    seen = made.router.inference.tokenizer.render
    rendered: list[Any] = []
    made.router.inference.tokenizer.render = lambda *given: (rendered.append(given[0]), seen(*given))[1]
    say(made, "Done.")
    answer = await made.direct.post("/v1/responses", json={"input": [*before, *hosted, *called]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["ignored"] == {f"input[{i}]": item["type"] for i, item in enumerate(hosted, len(before))}
    say(made, "Done.")
    assert (await made.direct.post("/v1/chat/completions", json={"messages": chat})).status_code == 200
    assert rendered[0] == rendered[1] and len(rendered[0]) == len(chat)


# ------------------------------------------------------------------------------------------------------- Claude Code

EPHEMERAL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
CLAUDE_TOOLS = [
    {"name": "Bash", "description": "Runs a command.", "input_schema": SCHEMA | {"additionalProperties": False}},
    {"type": "custom", "name": "Read", "description": "", "input_schema": {"type": "object", "properties": {}},
     "eager_input_streaming": True, "defer_loading": False, "strict": False, **EPHEMERAL},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8, "allowed_domains": ["example.com"]},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
]  # fmt: skip


def claude(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": "tiny",
        "max_tokens": 400,
        "messages": messages,
        "system": [
            {"type": "text", "text": "You are Claude Code.", **EPHEMERAL},
            {"type": "text", "text": "Be brief.", "citations": None},
        ],
        "tools": CLAUDE_TOOLS,
        "thinking": {"type": "enabled", "budget_tokens": 300},
        "metadata": {"user_id": "user_1_account__session_2"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "mcp_servers": [],
        "stream": True,
    }


async def test_claude_code_works_over_two_calls(serve: Callable) -> None:
    made = await serve("v32")
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,oauth-2025-04-20",
               "x-app": "cli", "anthropic-dangerous-direct-browser-access": "true"}  # fmt: skip
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>x</system-reminder>"},
            {"type": "text", "text": "List the files.", **EPHEMERAL},
        ]},
    ]  # fmt: skip
    for output, failed in (([{"type": "text", "text": "a.py"}], False), ("permission denied", True), (None, None)):
        count = await made.direct.post("/v1/messages/count_tokens?beta=true", json=claude(messages), headers=headers)
        assert count.status_code == 200, count.text
        say(made, "Hm.</think>I look." + (v32(("Bash", '{"city": "ls"}')) if output else ""))
        answer = await made.direct.post("/v1/messages?beta=true", json=claude(messages), headers=headers)
        assert answer.status_code == 200, answer.text
        told = events(answer.text)
        assert count.json()["input_tokens"] == len(made.prefills[0].submitted[-1].token_ids)
        assert told[0]["message"]["ignored"] == {
            "tools[2]": "web_search_20250305", "tools[3]": "bash_20250124", "tools[4]": "text_editor_20250728"
        }  # fmt: skip
        assert told[-2]["delta"]["stop_reason"] == ("tool_use" if output else "end_turn")
        if output is None:
            break
        blocks = [event["content_block"] for event in told if event["type"] == "content_block_start"]
        call = blocks[2] | {"input": {"city": "ls"}, **EPHEMERAL}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": output, "is_error": failed}
        messages += [
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "I look."}, call
            ]},
            {"role": "user", "content": [result | EPHEMERAL, {"type": "text", "text": "Go on."}]},
        ]  # fmt: skip
    prompt = prompt_of(made)
    assert prompt.index("Claude Code") < prompt.index("List the files.") < prompt.index("a.py") < prompt.index("denied")
    assert "web_search" not in prompt and made.prefills[0].submitted


LONG = re.compile(
    r"prompt is too long[^0-9]*(\d+) tokens > (\d+) maximum; this model's maximum context length is (\d+)"
)
BOTH = re.compile(r"input length and `(?:max|max_output)_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)")


@pytest.mark.parametrize("path", APIS)
async def test_agents_find_what_does_not_fit(path: str, pair: Cluster) -> None:
    """They search errors for these words, then they shorten the conversation, or ask for less."""
    name, field = ("input", "max_output_tokens") if path == "/v1/responses" else ("messages", "max_tokens")
    for text, tokens, words in (("x" * 600, 9, LONG), ("x" * 9000, 9, LONG), ("x", CONTEXT, BOTH)):
        answer = await pair.http.post(path, json={name: [{"role": "user", "content": text}], field: tokens})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error.get("code", "") in ("context_length_exceeded", "")
        asked, more, limit = map(int, words.search(error["message"]).groups())
        assert limit == CONTEXT
        assert asked > more == limit - 1 if words is LONG else asked + more > limit and more == tokens
