"""The request of /v1/responses, and how it becomes an `Ask`. Nothing is kept between requests."""

import itertools
import json
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from millrace_common.json_values import Json, JsonObject
from millrace_rpc.errors import Path
from pydantic import BeforeValidator, Field, Tag

from millrace_router.apis.openai import chat
from millrace_router.apis.openai.types import Lenient, Obfuscation, PlainFormat, SchemaFormat, Strict, VendorRequest
from millrace_router.apis.parsing import HABITS, Items, OfType, OneOf, or_text
from millrace_router.flow.ask import Ask, Chat
from millrace_router.text.chat_format import Tool

KEPT = "this server keeps nothing: send the whole conversation as input"


class ItemText(Lenient):
    type: Literal["input_text", "output_text"]
    text: str


Parts = Annotated[Items[ItemText], or_text(lambda text: {"type": "input_text", "text": text}, list[ItemText])]


class MessageItem(Lenient):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class CallItem(Lenient):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: chat.CallArguments

    def as_call(self) -> JsonObject:
        return chat.called(self.call_id, self.name, self.arguments)


class CustomCallItem(Lenient):
    """A call with a text instead of arguments, of another server's model."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    """The model sees a call with the argument `input`."""

    def as_call(self) -> JsonObject:
        return chat.called(self.call_id, self.name, json.dumps({"input": self.input}, ensure_ascii=False))


class ShellCallItem(Lenient):
    """`id` is that of the call for clients that know no `call_id`."""

    type: Literal["local_shell_call"]
    call_id: str = ""
    id: str = ""
    action: JsonObject

    def as_call(self) -> JsonObject:
        return chat.called(self.call_id or self.id, "local_shell", json.dumps(self.action, ensure_ascii=False))


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


class ReasoningText(Lenient):
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Lenient):
    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None
    encrypted_content: str | None = None
    """Of another server. Without `content` it is left out, and named in the answer."""


def _typed(items: list[Json]) -> list[Json]:
    """Items without a type are messages."""
    untyped = (isinstance(item, dict) and item.get("type") is None for item in items)
    return [item | {"type": "message"} if lacks else item for item, lacks in zip(items, untyped, strict=True)]


Call = CallItem | CustomCallItem | ShellCallItem
Output = CallOutputItem | ShellOutputItem
Item = OfType[MessageItem | Call | Output | ReasoningItem | HostedItem]
Text = or_text(lambda text: {"role": "user", "content": text}, list[Item])
Input = Annotated[Items[Item], BeforeValidator(_typed), Text]


class ItemTool(chat.AnyTool, chat.Function):
    """All tools are seen at once, and nothing but the model calls."""

    IGNORED: ClassVar = chat.Function.IGNORED | {"allowed_callers", "defer_loading", "output_schema"}

    def as_tool(self, i: int) -> Tool:
        return self.tool(("tools", i))

    def about(self) -> JsonObject:
        return self.model_dump(include=set(chat.Function.model_fields)) if self.served else {}


class FunctionChoice(chat.FunctionName):
    type: Literal["function"]


class TextConfig(Strict):
    format: OfType[PlainFormat | SchemaFormat] = PlainFormat(type="text")
    verbosity: str | None = None
    """Changes nothing."""


class ReasoningConfig(Strict):
    effort: chat.Effort | None = None
    """As `reasoning_effort` in chat."""
    summary: str | None = None
    """Changes nothing: reasoning comes whole."""
    generate_summary: str | None = None
    """Changes nothing."""
    context: str | None = None
    """Changes nothing: the template decides which reasoning it shows."""
    mode: str | None = None
    """Changes nothing."""


Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesRequest(VendorRequest):
    IGNORED: ClassVar = HABITS | frozenset(
        {"client_metadata", "max_tool_calls", "metadata", "safety_identifier", "service_tier", "store"}
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
    tool_choice: OneOf[chat.Choice | Annotated[FunctionChoice, Tag("an object")]] = "auto"
    """`required` and a name make the output a call."""
    parallel_tool_calls: bool = True
    """False: the output ends with the first call."""
    max_output_tokens: int | None = None
    """Absent: the rest of the context."""
    reasoning: ReasoningConfig = ReasoningConfig()
    text: TextConfig = TextConfig()
    truncation: Literal["disabled"] = "disabled"
    include: Items[Include] = Field([])
    """Reasoning comes in plain text, and nothing comes of the vendor's own tools."""
    stream_options: Obfuscation = Obfuscation()
    chat_template_kwargs: chat.Arguments = Field({})
    """Beyond the vendor: arguments that the template has, such as `thinking` of V3.1 and V3.2. Scalars."""

    def as_chat(self) -> Chat:
        schema, thinking = self.text.format.schema_of, chat.thinks(self.reasoning.effort)
        arguments = chat.template_arguments(self.chat_template_kwargs, thinking, schema)
        choice = chat.ChosenTools.of(self.tool_choice, ("tool_choice", "name"))
        ignored = {f"input[{i}]": item.type for i, item in enumerate(self.input) if _is_left_out(item)}
        return chat.chat_of(self._messages(), self.tools, choice, self.parallel_tool_calls, arguments, ignored)

    def ask(self, request_id: str) -> Ask:
        origins: dict[Path, Path] = {
            ("prompt",): ("input",),
            ("messages",): ("input",),
            ("grammar",): ("text", "format"),
            ("max_tokens",): ("max_output_tokens",),
        }
        schema, numbers = self.text.format.schema_of, {"max_tokens": self.max_output_tokens}
        grammar = None if schema is None else schema.grammar()
        return self.as_ask(self.as_chat(), request_id, numbers, origins, grammar=grammar)

    def _messages(self) -> Iterator[JsonObject]:
        """Consecutive items of the assistant are one turn."""
        if self.instructions:
            yield chat.message("system", self.instructions)
        kept = itertools.filterfalse(_is_left_out, self.input)
        for by_assistant, items in itertools.groupby(kept, _by_assistant):
            if by_assistant:
                yield _assistant(list(items))
            else:
                yield from map(_turn, items)


def _is_left_out(item: Item) -> bool:
    sealed = isinstance(item, ReasoningItem) and item.encrypted_content and not item.content
    return bool(sealed) or isinstance(item, HostedItem)


def _by_assistant(item: Item) -> bool:
    return item.role == "assistant" if isinstance(item, MessageItem) else not isinstance(item, Output)


def _assistant(items: list[Item]) -> JsonObject:
    texts = [_joined(item.content) for item in items if isinstance(item, MessageItem)]
    reasoning = [part.text for item in items if isinstance(item, ReasoningItem) for part in item.content or ()]
    calls = [item.as_call() for item in items if isinstance(item, Call)]
    return chat.message("assistant", "".join(texts), calls, reasoning_content="".join(reasoning))


def _turn(item: Item) -> JsonObject:
    if isinstance(item, CallOutputItem):
        return chat.message("tool", _joined(item.output), tool_call_id=item.call_id)
    if isinstance(item, ShellOutputItem):
        return chat.message("tool", item.output, tool_call_id=item.id)
    assert isinstance(item, MessageItem)
    return chat.message(item.role, _joined(item.content))


def _joined(parts: list[ItemText]) -> str:
    return "".join(part.text for part in parts)
