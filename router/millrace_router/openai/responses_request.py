"""The request of /v1/responses, and how it becomes a request of chat. Nothing is kept between requests."""

from __future__ import annotations

import itertools
import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from millrace_router.openai.chat import AnyTool, CallArguments, Effort, Function, FunctionName
from millrace_router.openai.translated import Lenient, Translated
from millrace_router.openai.types import Items, JsonSchema, Strict

KEPT = "this server keeps nothing: send the whole conversation as input"


class ItemText(Lenient):
    type: Literal["input_text", "output_text"]
    text: str


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


Parts = Annotated[Items[ItemText], BeforeValidator(_as_parts, json_schema_input_type=str | list[ItemText])]


class MessageItem(Lenient):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class CallItem(Lenient):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: CallArguments

    def as_call(self) -> dict[str, Any]:
        return {"id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}


class CustomCallItem(Lenient):
    """A call with a text instead of arguments, of another server's model."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str

    def as_call(self) -> dict[str, Any]:
        return {"id": self.call_id, "function": {"name": self.name, "arguments": json.dumps({"input": self.input})}}


class ShellCallItem(Lenient):
    """`id` is that of the call for clients that know no `call_id`."""

    type: Literal["local_shell_call"]
    call_id: str = ""
    id: str = ""
    action: dict[str, Any]

    def as_call(self) -> dict[str, Any]:
        function = {"name": "local_shell", "arguments": json.dumps(self.action)}
        return {"id": self.call_id or self.id, "function": function}


class CallOutputItem(Lenient):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Parts


class ShellOutputItem(Lenient):
    type: Literal["local_shell_call_output"]
    id: str
    output: str


class HostedItem(Lenient):
    """What a tool of the vendor's servers did in an earlier turn. It is left out."""

    type: Literal[
        "code_interpreter_call",
        "file_search_call",
        "image_generation_call",
        "mcp_call",
        "mcp_list_tools",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    ]


class Thoughts(Lenient):
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Lenient):
    type: Literal["reasoning"]
    content: Items[Thoughts] | None = None


def _as_items(value: Any) -> Any:
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [{"type": "message"} | item if isinstance(item, dict) else item for item in value]


Call = CallItem | CustomCallItem | ShellCallItem
Output = CallOutputItem | ShellOutputItem
Item = Annotated[MessageItem | Call | Output | ReasoningItem | HostedItem, Field(discriminator="type")]
Input = Annotated[Items[Item], BeforeValidator(_as_items, json_schema_input_type=str | list[Item])]


class ItemTool(AnyTool, Function):
    """All tools are seen at once, so `defer_loading` is ignored; `output_schema` is not shown."""

    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None
    allowed_callers: list[str] | None = None  # nothing but the model calls

    def about(self) -> dict[str, Any]:
        return self.model_dump(include=set(Function.model_fields)) if self.served else {}


class FunctionChoice(FunctionName):
    type: Literal["function"]


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"] = "text"


class TextConfig(Strict):
    """`verbosity` is ignored: the model knows none."""

    format: TextFormat = TextFormat()
    verbosity: str | None = None


class ReasoningConfig(Strict):
    """`effort`: thoughts or none, for templates that have the choice. They come whole: the rest is ignored."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None  # the template decides which thoughts it shows
    mode: str | None = None


# Thoughts come in plain text, and nothing comes of the vendor's own tools.
Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ObfuscationOption(Strict):
    include_obfuscation: Literal[False] = False


class ResponsesRequest(Translated):
    IGNORED: ClassVar = frozenset(
        {"client_metadata", "max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_options"}
        | {"prompt_cache_retention", "safety_identifier", "service_tier", "store"}
    )
    UNSUPPORTED: ClassVar = {
        "background": "keep the connection open",
        "context_management": KEPT,
        "conversation": KEPT,
        "moderation": "nothing is moderated",
        "previous_response_id": KEPT,
        "prompt": KEPT,
        "top_logprobs": "ask /v1/chat/completions for logprobs",
    }
    NAMES: ClassVar = {
        "max_tokens": "max_output_tokens", "messages": "input", "prompt": "input", "response_format": "text",
    }  # fmt: skip

    input: Input
    instructions: str | None = None
    tools: Items[ItemTool] = Field([])
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = None
    reasoning: ReasoningConfig = ReasoningConfig()
    text: TextConfig = TextConfig()
    truncation: Literal["disabled"] = "disabled"
    include: Items[Include] = Field([])
    stream_options: ObfuscationOption = ObfuscationOption()
    user: str = ""

    @property
    def ignored(self) -> dict[str, str]:
        return {f"input[{i}]": item.type for i, item in enumerate(self.input) if isinstance(item, HostedItem)}

    def conversation(self) -> dict[str, Any]:
        choice, form = self.tool_choice, self.text.format
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        schema = form if form.type == "json_schema" else None
        return {
            "messages": system + turns([item for item in self.input if not isinstance(item, HostedItem)]),
            "tools": [{"type": tool.type, "function": tool.about()} for tool in self.tools],
            "tool_choice": {"type": "function", "function": choice} if isinstance(choice, FunctionName) else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_tokens": self.max_output_tokens,
            "response_format": {"type": form.type, "json_schema": schema},
            "reasoning_effort": self.reasoning.effort,
            "user": self.user,
            **self.shared(None),
        }


def turns(items: list[Item]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for by_assistant, group in itertools.groupby(items, _by_assistant):
        some = list(group)
        made += [_assistant(some)] if by_assistant else map(_turn, some)
    return made


def _by_assistant(item: Item) -> bool:
    return item.role == "assistant" if isinstance(item, MessageItem) else not isinstance(item, Output)


def _assistant(items: list[Item]) -> dict[str, Any]:
    """Consecutive items of the assistant are one turn."""
    texts = [_joined(item.content) for item in items if isinstance(item, MessageItem)]
    thoughts = [part.text for item in items if isinstance(item, ReasoningItem) for part in item.content or ()]
    calls = [item.as_call() for item in items if isinstance(item, Call)]
    said = {"content": "".join(texts), "reasoning_content": "".join(thoughts), "tool_calls": calls}
    return {"role": "assistant", **said}


def _turn(item: Item) -> dict[str, Any]:
    if isinstance(item, CallOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)}
    if isinstance(item, ShellOutputItem):
        return {"role": "tool", "tool_call_id": item.id, "content": item.output}
    assert isinstance(item, MessageItem)
    return {"role": item.role, "content": _joined(item.content)}


def _joined(parts: list[ItemText]) -> str:
    return "".join(part.text for part in parts)
