"""The request of /v1/responses, and how it becomes a request of chat. Nothing is kept between requests."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from millrace_router.openai.chat import CallArguments, Effort, Function, FunctionName
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


class CallOutputItem(Lenient):
    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class Thoughts(Lenient):
    type: Literal["reasoning_text"]
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


Item = Annotated[MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")]
Input = Annotated[Items[Item], BeforeValidator(_as_items, json_schema_input_type=str | list[Item])]


class ItemTool(Function):
    type: Literal["function"]


class FunctionChoice(FunctionName):
    type: Literal["function"]


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"] = "text"


class TextConfig(Strict):
    """`verbosity` is ignored: the model knows none."""

    format: TextFormat = TextFormat()
    verbosity: str | None = None


class ReasoningConfig(Strict):
    """`effort`: thoughts or none, for templates that have the choice. They come whole, so `summary` is ignored."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ObfuscationOption(Strict):
    include_obfuscation: Literal[False] = False


class ResponsesRequest(Translated):
    IGNORED: ClassVar = frozenset(
        {"max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
        | {"safety_identifier", "service_tier", "store"}
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
    include: Items[Literal["reasoning.encrypted_content"]] = Field([])  # thoughts come in plain text
    stream_options: ObfuscationOption = ObfuscationOption()
    user: str = ""

    def conversation(self) -> dict[str, Any]:
        choice, form = self.tool_choice, self.text.format
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        schema = form if form.type == "json_schema" else None
        return {
            "messages": system + turns(self.input),
            "tools": [{"type": "function", "function": tool} for tool in self.tools],
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
    return not isinstance(item, CallOutputItem) and (not isinstance(item, MessageItem) or item.role == "assistant")


def _assistant(items: list[Item]) -> dict[str, Any]:
    """Consecutive items of the assistant are one turn."""
    texts = [_joined(item.content) for item in items if isinstance(item, MessageItem)]
    thoughts = [part.text for item in items if isinstance(item, ReasoningItem) for part in item.content or ()]
    calls = [item.as_call() for item in items if isinstance(item, CallItem)]
    said = {"content": "".join(texts), "reasoning_content": "".join(thoughts), "tool_calls": calls}
    return {"role": "assistant", **said}


def _turn(item: Item) -> dict[str, Any]:
    if isinstance(item, CallOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)}
    assert isinstance(item, MessageItem)
    return {"role": item.role, "content": _joined(item.content)}


def _joined(parts: list[ItemText]) -> str:
    return "".join(part.text for part in parts)
