"""The forms in which clients write one request. Each means what the plain form means, or is refused with its field."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase
from millrace.v1 import worker_pb2
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from router.harness import Cluster
from router.scripted import say

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = {"role": "user", "content": "Hi"}
Body = dict[str, Any]
PLAIN: dict[str, Body] = {
    CHAT: {"messages": [HI], "max_tokens": 50, "seed": 0},
    RESPONSES: {"input": [HI], "max_output_tokens": 50, "seed": 0},
    MESSAGES: {"messages": [HI], "max_tokens": 50, "seed": 0},
}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


async def asked(made: Cluster, path: str, body: Body) -> tuple[list[int], bytes]:
    """The token ids and the parameters that the workers get."""
    say(made, "Done.")
    answer = await made.direct.post(path, content=json.dumps(body).encode())
    assert answer.status_code == 200, (path, body, answer.text)
    request: worker_pb2.EngineRequest = made.prefills[0].submitted[-1]
    return list(request.token_ids), request.sampling.SerializeToString(deterministic=True)


FIELDS = {CHAT: CompletionCreateParamsBase, RESPONSES: ResponseCreateParamsBase, MESSAGES: MessageCreateParamsBase}
# Fields that change nothing
NEUTRAL: dict[str, list[Body]] = {
    CHAT: [
        {"tools": [], "functions": [], "stop": [], "logit_bias": {}, "metadata": {}, "model": "", "modalities": []},
        {"tool_choice": "auto"}, {"tool_choice": "none", "tools": []}, {"parallel_tool_calls": False},
        {"n": 1, "stream": True}, {"stream_options": {"include_usage": True}}, {"stream_options": {}},
        {"logprobs": False, "top_logprobs": 0}, {"top_logprobs": 0},
        {"response_format": {"type": "text"}}, {"modalities": ["text"]}, {"chat_template_kwargs": {}},
        {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "verbosity": "low", "safety_identifier": "x"},
        {"prompt_cache_key": "x", "prompt_cache_retention": "24h"}, {"max_tokens": None, "max_completion_tokens": 50},
        {"messages": [HI | {"content": [{"type": "text", "text": "Hi"}]}]},
        {"messages": [HI | {"content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i", **EPHEMERAL}]}]},
        {"messages": [HI | {"name": None, "tool_calls": None, "refusal": None} | EPHEMERAL]},
    ],
    RESPONSES: [
        {"instructions": "", "tools": [], "include": [], "metadata": {}, "text": {}, "reasoning": {}},
        {"background": False, "top_logprobs": 0, "truncation": "disabled", "tool_choice": "auto"},
        {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"], "store": True},
        {"text": {"format": {"type": "text"}, "verbosity": "high"}, "max_tool_calls": 3},
        {"reasoning": {"summary": "auto", "effort": None, "context": "auto", "mode": "standard"}},
        {"client_metadata": {"a": "b"}, "stream": True, "stream_options": {"include_obfuscation": False}},
        {"input": "Hi"}, {"input": [{"type": "message", "id": None, "status": None, **HI}]},
        {"input": [HI | {"content": [{"type": "input_text", "text": "Hi", "prompt_cache_breakpoint": None}]}]},
    ],
    MESSAGES: [
        {"system": "", "tools": [], "stop_sequences": [], "mcp_servers": [], "metadata": {}, "output_config": {}},
        {"system": [], "tool_choice": {"type": "auto"}, "context_management": {"edits": []}},
        {"output_config": {"effort": "max"}, "speed": "fast", "service_tier": "auto", **EPHEMERAL},
        {"messages": [HI | {"content": [{"type": "text", "text": "Hi", "citations": None, **EPHEMERAL}]}]},
    ],
}  # fmt: skip


@pytest.mark.parametrize("path", PLAIN)
async def test_what_changes_nothing(path: str, serve: Callable) -> None:
    made = await serve("v31")
    plain = await asked(made, path, PLAIN[path])
    nulls = dict.fromkeys(FIELDS[path].__annotations__.keys() - PLAIN[path].keys())
    for fields in (nulls, *NEUTRAL[path]):
        assert await asked(made, path, PLAIN[path] | fields) == plain, fields
    assert plain == await asked(made, CHAT, PLAIN[CHAT]), "the APIs agree"


FUNCTION = {"name": "weather", "arguments": '{"city": "Oslo"}'}
CALL = {"id": "1", "type": "function", "function": FUNCTION}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
NO_ARGUMENTS = CALLS | {"tool_calls": [CALL | {"function": {"name": "weather", "arguments": "{}"}}]}
ITEM, OUTPUT = {"type": "function_call", "call_id": "1", **FUNCTION}, {"type": "function_call_output", "call_id": "1"}
SAID = {"role": "assistant", "content": "Hello"}
USE = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Oslo"}}
USED = {"type": "tool_result", "tool_use_id": "1"}
TEXTS = [{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}]


def uses(*results: Body) -> list[Body]:
    return [HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": list(results)}]


# A conversation, as messages of chat in the plain form, and how else it is written
WAYS: dict[str, tuple[list[Body], list[tuple[str, list[Body]]]]] = {
    "a call and its result": (
        [HI, CALLS, RESULT],
        [
            (CHAT, [HI, {"role": "assistant", "tool_calls": [CALL]}, RESULT]),
            (CHAT, [HI, CALLS | {"content": ""}, RESULT]),
            (CHAT, [HI, CALLS | {"content": []}, RESULT]),
            (CHAT, [HI, CALLS | {"annotations": [], "audio": None, "function_call": None, "refusal": None}, RESULT]),
            (CHAT, [HI, CALLS | {"tool_calls": [CALL | {"index": 0}]}, RESULT | {"content": TEXTS}]),
            (RESPONSES, [HI, ITEM, OUTPUT | {"output": "sunny"}]),
            (RESPONSES, [HI, ITEM | {"id": "fc_1", "status": "completed", "namespace": None},
                         OUTPUT | {"output": [{"type": "input_text", "text": "sunny"}], "status": "completed"}]),
            (RESPONSES, [HI, {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}, ITEM,
                         OUTPUT | {"output": "sunny"}]),
            (MESSAGES, uses(USED | {"content": "sunny"})),
            (MESSAGES, uses(USED | {"content": [{"type": "text", "text": "sunny", **EPHEMERAL}], "is_error": True})),
        ],
    ),
    "an empty result": (
        [HI, CALLS, RESULT | {"content": ""}],
        [
            (CHAT, [HI, CALLS, RESULT | {"content": []}]),
            (RESPONSES, [HI, ITEM, OUTPUT | {"output": ""}]),
            (RESPONSES, [HI, ITEM, OUTPUT | {"output": []}]),
            *((MESSAGES, uses(USED | more)) for more in ({}, {"content": None}, {"content": []}, {"content": ""})),
        ],
    ),
    "a call without arguments": (
        [HI, NO_ARGUMENTS, RESULT],
        [
            (CHAT, [HI, CALLS | {"tool_calls": [{"id": "1", "function": {"name": "weather"}}]}, RESULT]),
            (MESSAGES, [HI, {"role": "assistant", "content": [USE | {"input": {}}]},
                        {"role": "user", "content": [USED | {"content": "sunny"}]}]),
        ],
    ),
    "an answer": (
        [HI, SAID, HI],
        [
            (CHAT, [HI, SAID | {"tool_calls": [], "annotations": None}, HI]),
            (RESPONSES, [HI, {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
                              "phase": "final_answer", "content": [
                                  {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]}, HI]),
            (MESSAGES, [HI, SAID | {"content": [{"type": "text", "text": "Hello"}]}, HI]),
            (MESSAGES, [HI, SAID | {"content": [{"type": "redacted_thinking", "data": "x"},
                                                {"type": "text", "text": "Hello", "citations": None}]}, HI]),
            (MESSAGES, [HI, SAID | {"content": [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                {"type": "text", "text": "Hello"}]}, HI]),
        ],
    ),
    "an empty answer": (
        [HI, SAID | {"content": ""}, HI],
        [
            (CHAT, [HI, {"role": "assistant", "content": None}, HI]),
            (CHAT, [HI, {"role": "assistant"}, HI]),
            (CHAT, [HI, {"role": "assistant", "content": None, "tool_calls": []}, HI]),
            (RESPONSES, [HI, {"role": "assistant", "content": []}, HI]),
            (MESSAGES, [HI, {"role": "assistant", "content": []}, HI]),
        ],
    ),
    "parts of the developer's words": (
        [{"role": "developer", "content": "AB"}, HI],
        [(RESPONSES, [{"role": "developer", "content": [{"type": "input_text", "text": text} for text in "AB"]}, HI])],
    ),
    "a text before a call": (
        [HI, CALLS | {"content": "I look."}, RESULT],
        [(RESPONSES, [HI, {"role": "assistant", "content": "I look."}, ITEM, OUTPUT | {"output": "sunny"}])],
    ),
    "system messages anywhere": (
        [{"role": "system", "content": "A"}, HI, {"role": "system", "content": "B"}, HI],
        [
            (RESPONSES, [{"role": "system", "content": "A"}, HI, {"role": "system", "content": "B"}, HI]),
            (MESSAGES, [{"role": "system", "content": "A"}, HI, {"role": "system", "content": "B"}, HI]),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ["v31", "v32", "kimi"])
async def test_a_conversation_means_the_same_in_every_way_to_write_it(form: str, serve: Callable) -> None:
    made = await serve(form)
    for name, (plain, ways) in WAYS.items():
        first = await asked(made, CHAT, PLAIN[CHAT] | {"messages": plain})
        for path, messages in ways:
            body = PLAIN[path] | {"input" if path == RESPONSES else "messages": messages}
            assert await asked(made, path, body) == first, (name, messages)


ACCEPTED: list[list[Body]] = [  # conversations that look odd
    [HI, HI, HI],
    [SAID, HI],
    [{"role": "developer", "content": "x"}, HI],
    [{"role": "system", "content": "x"}, {"role": "developer", "content": "y"}, HI],
    [HI | {"name": "bob"}],
    [HI | {"content": ""}],
    [HI | {"content": []}],
    [HI | {"content": "日本語 🎉 \u0000 \u2028"}],
    [{"role": "system", "content": "x"}],
    [HI, SAID],
    [HI, CALLS | {"tool_calls": [CALL, CALL | {"id": "2"}]}, RESULT | {"tool_call_id": "2"}, RESULT],
]


async def test_odd_conversations_are_accepted(serve: Callable) -> None:
    made = await serve("v31")
    for messages in ACCEPTED:
        await asked(made, CHAT, PLAIN[CHAT] | {"messages": messages})
        if not any("tool_calls" in message or "name" in message for message in messages):
            await asked(made, RESPONSES, PLAIN[RESPONSES] | {"input": messages})


async def test_a_tool_as_clients_write_it(serve: Callable) -> None:
    made = await serve("takes")
    about = {"name": "wetter_2", "description": "größe 日本", "parameters": {"type": "object", "properties": {
        "größe": {"type": ["string", "null"], "enum": ["日", None], "default": None}}}}  # fmt: skip
    plain = await asked(made, CHAT, PLAIN[CHAT] | {"tools": [{"type": "function", "function": about}]})
    for path, tool in (
        (CHAT, {"type": "function", "function": about | {"strict": None}, **EPHEMERAL}),
        (CHAT, {"type": "function", "function": about | {"strict": False}}),
        (RESPONSES, {"type": "function", **about}),
        (RESPONSES, {"type": "function", **about, "strict": False, "defer_loading": True, "output_schema": {}}),
        (MESSAGES, {"name": "wetter_2", "description": "größe 日本", "input_schema": about["parameters"]}),
        (MESSAGES, {"type": "custom", "name": "wetter_2", "description": "größe 日本", **EPHEMERAL,
                    "input_schema": about["parameters"], "defer_loading": True, "eager_input_streaming": True}),
    ):  # fmt: skip
        assert await asked(made, path, PLAIN[path] | {"tools": [tool]}) == plain, tool
