"""The request of /v1/responses, and how it becomes a request of chat. Nothing is kept between requests."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from millrace_rpc.errors import Path
from pydantic import BeforeValidator, Field, Tag

from millrace_router.openai.chat import AnyTool, CallArguments, Choice, Effort, Function, FunctionName
from millrace_router.openai.parsing import HABITS, Items, OfType, OneOf, or_text
from millrace_router.openai.translated import Lenient, Translated
from millrace_router.openai.types import JsonSchema, Strict

KEPT = "this server keeps nothing: send the whole conversation as input"


class ItemText(Lenient):
    type: Literal["input_text", "output_text"]
    text: str


def _as_part(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}


Parts = Annotated[Items[ItemText], or_text(_as_part, list[ItemText])]


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
    """The model sees a call with the argument `input`."""

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


def _as_item(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _typed(items: list[Any]) -> list[Any]:
    """Items without a type are messages."""
    untyped = (isinstance(item, dict) and item.get("type") is None for item in items)
    return [item | {"type": "message"} if lacks else item for item, lacks in zip(items, untyped, strict=True)]


Call = CallItem | CustomCallItem | ShellCallItem
Output = CallOutputItem | ShellOutputItem
Item = OfType[MessageItem | Call | Output | ReasoningItem | HostedItem]
Input = Annotated[Items[Item], BeforeValidator(_typed), or_text(_as_item, list[Item])]


class ItemTool(AnyTool, Function):
    """All tools are seen at once, and nothing but the model calls."""

    IGNORED: ClassVar = Function.IGNORED | {"allowed_callers", "defer_loading", "output_schema"}

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
    """Changes nothing."""


class ReasoningConfig(Strict):
    """`effort`: thoughts or none, for templates that have the choice. They come whole: the rest is ignored."""

    effort: Effort | None = None
    """As `reasoning_effort` in chat."""
    summary: str | None = None
    """Changes nothing: thoughts come whole."""
    generate_summary: str | None = None
    """Changes nothing."""
    context: str | None = None
    """Changes nothing: the template decides which thoughts it shows."""
    mode: str | None = None
    """Changes nothing."""


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
    """Nothing is obfuscated."""


class ResponsesRequest(Translated):
    IGNORED: ClassVar = HABITS | frozenset(
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
    input: Input
    """A text, or the whole conversation; text only. An item without a type is a message. Consecutive items of the
    assistant are one turn.
    """
    instructions: str | None = None
    """The system message."""
    tools: Items[ItemTool] = Field([])
    """At most 128."""
    tool_choice: OneOf[Choice | Annotated[FunctionChoice, Tag("an object")]] = "auto"
    """`required` and a name make the output a call."""
    parallel_tool_calls: bool = True
    """False: the output ends with the first call."""
    max_output_tokens: int | None = None
    """Absent: the rest of the context."""
    reasoning: ReasoningConfig = ReasoningConfig()
    text: TextConfig = TextConfig()
    truncation: Literal["disabled"] = "disabled"
    include: Items[Include] = Field([])
    """Thoughts come in plain text, and nothing comes of the vendor's own tools."""
    stream_options: ObfuscationOption = ObfuscationOption()
    user: str = ""
    """The session, unless the header x-session-id names one. At most 512 characters."""

    @property
    def ignored(self) -> dict[str, str]:
        return {f"input[{i}]": item.type for i, item in enumerate(self.input) if isinstance(item, HostedItem)}

    def conversation(self) -> dict[str, Any]:
        choice, form = self.tool_choice, self.text.format
        schema = form if form.type == "json_schema" else None
        return {
            "messages": [turn for turn, _ in self._turns()],
            "tools": [{"type": tool.type, "function": tool.about()} for tool in self.tools],
            "tool_choice": {"type": "function", "function": choice} if isinstance(choice, FunctionName) else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_tokens": self.max_output_tokens,
            "response_format": {"type": form.type, "json_schema": schema},
            "reasoning_effort": self.reasoning.effort,
            "user": self.user,
            **self.shared(None),
        }

    def _turns(self) -> Iterator[tuple[dict[str, Any], dict[Path, Path]]]:
        """As turns of chat, and where the parts of each come from."""
        if self.instructions:
            yield {"role": "system", "content": self.instructions}, {(): ("instructions",)}
        kept = ((i, item) for i, item in enumerate(self.input) if not isinstance(item, HostedItem))
        for by_assistant, group in itertools.groupby(kept, lambda at: _by_assistant(at[1])):
            some = list(group)
            if by_assistant:
                yield _assistant([item for _, item in some]), _parts(some)
            else:
                for i, item in some:
                    yield _turn(item), {(): ("input", i)}

    def origins(self) -> dict[Path, Path]:
        made: dict[Path, Path] = {
            ("max_tokens",): ("max_output_tokens",),
            ("messages",): ("input",),
            ("response_format",): ("text", "format"),
            ("response_format", "json_schema"): ("text", "format"),
            ("tool_choice", "function"): ("tool_choice",),
            ("reasoning_effort",): ("reasoning", "effort"),
        }
        for i in range(len(self.tools)):
            made["tools", i, "function"] = ("tools", i)
        for i, (_, parts) in enumerate(self._turns()):
            made |= {("messages", i, *part): origin for part, origin in parts.items()}
        return made


def _parts(items: Sequence[tuple[int, Item]]) -> dict[Path, Path]:
    """Where the parts of an assistant's turn come from."""
    origins: dict[Path, Path] = {(): ("input", items[0][0])}
    for k, i in enumerate(i for i, item in items if isinstance(item, Call)):
        origins["tool_calls", k] = origins["tool_calls", k, "function"] = ("input", i)
        origins["tool_calls", k, "id"] = ("input", i, "call_id")
    return origins


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
