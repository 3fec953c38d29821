"""Requests of the right form that no model can answer: each is refused with the name of its field, before any work.

Wrong types, unknown and missing fields, and those that no type has, are those of test_fields.py.
"""

import json
from collections.abc import Callable
from typing import Any

from router.harness import Cluster
from router.scripted import HELLO, SCHEMA, TOOLS

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 2},
    RESPONSES: {"input": "hello", "max_output_tokens": 8},
    MESSAGES: {"messages": HELLO, "max_tokens": 8},
    "/v1/completions": {},
    "/detokenize": {},
}
DEEP, DEEPER = (json.loads('{"a":' * depth + "1" + "}" * depth) for depth in (90, 300))
OURS = {"name": "weather", "input_schema": SCHEMA}
THINKING = {"type": "enabled", "budget_tokens": 1024}
CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "weather"}}]}


def says(*content: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [  # path, fields, the name with which the message begins, words
    (CHAT, {"tool_choice": "required"}, "tool_choice", "there are no tools"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
     "tool_choice.function.name", "'x'"),
    (CHAT, {"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].function.name", "'time' is used by another tool"),
    (CHAT, {"tools": [TOOLS[1]] * 129}, "tools", "at most 128"),
    (CHAT, {"tools": json.loads("[" * 300 + "]" * 300)}, "tools", "deep"),
    (CHAT, {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "combined"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
    (CHAT, {"response_format": {"type": "json_object", "regex": "a"}}, "response_format.regex", "no meaning"),
    (CHAT, form(DEEP), "response_format", "more than 64 deep"),
    (CHAT, {"guided_regex": ""}, "guided_regex", "0 bytes"),
    (CHAT, {"guided_regex": "a" * 70_000}, "guided_regex", "4096"),
    (CHAT, {"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
    (CHAT, {"guided_regex": "a", "min_tokens": 1}, "min_tokens", "guided_regex"),
    (CHAT, {"messages": []}, "messages", "must not be empty"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
    (CHAT, {"messages": [*HELLO, CALLED, {"role": "tool", "tool_call_id": "1", "content": None}]},
     "messages[2].content", "is required"),
    (CHAT, {"messages": [CALLED | {"role": "user", "content": ""}]}, "messages[0].tool_calls", "assistant"),
    (CHAT, {"messages": [*HELLO, {"role": "function", "name": "f", "content": "x"}]}, "messages[1].role", "must be"),
    (CHAT, says({"type": "text", "text": "x"}, {"type": "image_url"}), "messages[0].content[1].type", ""),
    (CHAT, {"response_format": {"type": "json_object"}, "top_p": 1e-46}, "top_p", "must be above 0"),  # 0 in 32 bits
    (CHAT, {"repetition_penalty": 2.0**-150}, "repetition_penalty", "must be above 0"),
    (CHAT, {"top_logprobs": 1}, "top_logprobs", "needs logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", ""),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", ""),
    (CHAT, {"max_tokens": 10**6}, "messages", "`max_tokens` exceed context limit"),
    (CHAT, {"web_search_options": {}}, "web_search_options", "no network"),
    (CHAT, {"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "not supported"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking", "template"),
    (CHAT, {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages", "template"),
    (CHAT, {"user": "x" * 513}, "user", "at most 512"),
    (CHAT, {"stop": "x" * 257}, "stop", "1 to 256"),
    (CHAT, {"stop": ""}, "stop", "1 to 256"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id", "keeps nothing"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "must be one of: 'message'"),
    (RESPONSES, {"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type", "compaction"),
    (RESPONSES, {"input": []}, "input", "must not be empty"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type",
     "must be 'input_text' or 'output_text'"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens", "must be"),
    (RESPONSES, {"max_output_tokens": 5000}, "input", "`max_output_tokens` exceed context limit"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "x"}},
     "tool_choice.name", "'x'"),
    (RESPONSES, {"tool_choice": "required"}, "tool_choice", "there are no tools"),
    (RESPONSES, {"input": [{"type": "local_shell_call", "action": DEEPER}]}, "input", "nested more than"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"a": "x" * 70_000}}}}, "text.format", ""),
    (RESPONSES, {"text": {"format": {"type": "json_object", "schema": SCHEMA}}}, "text.format.schema", "unknown"),
    (RESPONSES, {"text": {"format": {"schema": SCHEMA}}}, "text.format.type", "is required"),
    (MESSAGES, says({"type": "image", "source": {}}), "messages[0].content[0].type", "must be one of: 'text', "),
    (MESSAGES, says({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}),
     "messages[0].content[0].content[0].type", "must be 'text'"),
    (MESSAGES, says({"type": "tool_use", "id": "1", "name": "f", "input": {}}), "messages[0].content[0].type",
     "must not be 'tool_use' in a message of the user"),
    (MESSAGES, says({"type": "server_tool_use"}), "messages[0].content[0].type", "must not be 'server_tool_use'"),
    (MESSAGES, says({"type": "tool_use", "id": "1", "name": "f", "input": DEEPER}), "messages", "nested more than"),
    (MESSAGES, {"messages": [*HELLO, {"role": "assistant", "content": "It"}]}, "messages[1].role", "must not"),
    (MESSAGES, {"max_tokens": 5000}, "messages", "`max_tokens` exceed context limit"),
    (MESSAGES, {"stop_sequences": ["x"] * 17}, "stop_sequences", "must have at most 16"),
    (MESSAGES, {"stop_sequences": ["x", ""]}, "stop_sequences[1]", ""),
    (MESSAGES, {"tools": [OURS], "tool_choice": {"type": "tool"}}, "tool_choice.name", "is required with type tool"),
    (MESSAGES, {"tools": [OURS], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name", "'x' is"),
    (MESSAGES, {"thinking": THINKING, "chat_template_kwargs": {str(i): i for i in range(16)}}, "",
     "at most 16 entries"),
    *((MESSAGES, {"container": given}, "container", "is not supported: nothing is run here") for given in ("x", {})),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {"title": "x" * 70_000}}}},
     "output_config.format", "has a json_schema that cannot be used"),
    (MESSAGES, {"metadata": {"user_id": "x" * 513}}, "metadata.user_id", "at most 512"),
    ("/v1/completions", {"prompt": [[1, -1]]}, "prompt[0][1]", "must be a token id"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens[1]", "must be a token id"),
]  # fmt: skip


async def test_what_cannot_be_answered_is_refused_with_its_field(serve: Callable) -> None:
    made: Cluster = await serve("v31")
    wrong = []
    for path, fields, name, words in REFUSED:
        answer = await made.direct.post(path, json=PLAIN[path] | fields, headers={"x-request-id": "mine"})
        told = answer.json()
        message = told.get("error", {}).get("message", "")
        right = answer.status_code == 400 and message.startswith(name) and words in message
        if path == MESSAGES:
            error = {"type": "invalid_request_error", "message": message}
            right &= told == {"type": "error", "error": error, "request_id": "mine"}
        else:
            right &= told.get("error", {}).get("param") == name and message.startswith(f"{name} ")
        if not right:
            wrong.append((path, name, words, answer.text[:300]))
    assert wrong == [] and not any(worker.submitted for worker in made.workers)
