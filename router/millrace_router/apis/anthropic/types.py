"""Requests of the Messages API, and how they become an `Ask`."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from millrace_common.json_values import JsonObject
from millrace_common.quoted import cut
from millrace_rpc.errors import FieldError, Path
from pydantic import Field

from millrace_router.apis.openai import chat
from millrace_router.apis.openai.types import ApiRequest, Lenient, SchemaFormat, Strict, present
from millrace_router.apis.parsing import HABITS, Items, OfType, or_text
from millrace_router.apis.tool_parameters import Parameters
from millrace_router.flow.ask import Ask, Chat
from millrace_router.text.chat_format import Tool


class TextBlock(Lenient):
    type: Literal["text"]
    text: str


def _as_block(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


Texts = Annotated[Items[TextBlock], or_text(_as_block, list[TextBlock])]


class ThinkingBlock(Lenient):
    type: Literal["thinking"]
    thinking: str
    """For templates that show earlier reasoning. No signature is looked at."""


class ToolUseBlock(Lenient):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class ToolResultBlock(Lenient):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field([])
    is_error: bool = False
    """Not shown to the model: the content says it."""


class HostedBlock(Lenient):
    """What only the vendor's servers can read, or what their tools did. It is left out."""

    type: Literal[
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "mcp_tool_result",
        "mcp_tool_use",
        "redacted_thinking",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    ]


Block = OfType[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | HostedBlock]
Content = Annotated[Items[Block], or_text(_as_block, list[Block])]
BLOCKS = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock, HostedBlock),
    "system": (TextBlock,),
}


class InputMessage(Strict):
    IGNORED: ClassVar = HABITS

    role: Literal["user", "assistant", "system"]
    """The last message is not the assistant's."""
    content: Content
    """Images and documents are refused. The texts of a user's message are joined by a line break."""

    def turns(self, i: int) -> Iterator[JsonObject]:
        """As turns of chat."""
        for j, block in enumerate(self.content):
            if not isinstance(block, BLOCKS[self.role]):
                path = ("messages", i, "content", j, "type")
                raise FieldError(path, f"must not be {cut(block.type)!r} in a message of the {self.role}")
        texts = [block.text for block in self.content if isinstance(block, TextBlock)]
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                yield chat.message("tool", _joined(block.content), tool_call_id=block.tool_use_id)
        if self.role == "assistant":
            reasoning = "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock))
            uses = (block for block in self.content if isinstance(block, ToolUseBlock))
            calls = [chat.called(use.id, use.name, json.dumps(use.input, ensure_ascii=False)) for use in uses]
            yield chat.message("assistant", "".join(texts), calls, reasoning_content=reasoning)
        elif texts:
            yield chat.message(self.role, "\n".join(texts))


class CustomTool(chat.AnyTool):
    """All tools are seen at once, and nothing but the model calls. A grammar decides what streams: strict tools do."""

    SERVED: ClassVar = frozenset({"custom", "function"})
    IGNORED: ClassVar = HABITS | {"allowed_callers", "defer_loading", "eager_input_streaming"}
    UNSUPPORTED: ClassVar = {}

    type: str = "custom"
    """`custom` or `function`. Others are left out and named in the answer; with `strict_tools` refused."""
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None
    """The arguments follow the schema."""

    def as_tool(self, i: int) -> Tool:
        return Tool(self.name, self.description, self.input_schema, bool(self.strict), ("tools", i))


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    """With type `tool`."""
    disable_parallel_tool_use: bool = False
    """The output ends with the first call."""

    def chosen(self) -> chat.ChosenTools:
        if (self.name is not None) is not (self.type == "tool"):
            needed = "is required" if self.name is None else "has no meaning"
            raise FieldError(("tool_choice", "name"), f"{needed} with type {self.type}")
        return chat.ChosenTools({"any": "required"}.get(self.type, self.type), self.name, ("tool_choice", "name"))


class ThinkingConfig(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    """The argument `thinking` of the template is false with `disabled`, else true."""
    budget_tokens: int | None = None
    """Not enforced: `max_tokens` bounds reasoning and answer."""
    display: Literal["summarized", "omitted"] | None = None
    """`omitted`: no reasoning is sent."""


class OutputConfig(Strict):
    effort: str | None = None
    """Changes nothing."""
    format: SchemaFormat | None = None


IGNORED = HABITS | {
    "billing_policy", "context_management", "diagnostics", "inference_geo", "service_tier", "speed", "user_profile_id",
    "workspace_id",
}  # fmt: skip


ORIGINS: dict[Path, Path] = {
    ("prompt",): ("messages",),
    ("grammar",): ("output_config", "format"),
    ("stop",): ("stop_sequences",),
    ("session_id",): ("metadata", "user_id"),
}


class CountRequest(ApiRequest):
    """What makes the prompt. The rest of a message's request may be there, too."""

    IGNORED: ClassVar = IGNORED | frozenset({"max_tokens", "metadata", "stop_sequences"})
    UNSUPPORTED: ClassVar = {
        "container": "nothing is run here",
        "mcp_servers": "the model has no network; give tools and run them yourself",
        "thread": "this server keeps nothing: send the whole conversation as messages",
    }
    messages: Items[InputMessage]
    """Not empty."""
    system: Texts = Field([])
    """The system message."""
    tools: Items[CustomTool] = Field([])
    """At most 128."""
    tool_choice: ToolChoice = ToolChoice()
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: chat.Arguments = Field({})
    """Beyond the vendor: arguments that the template has, such as `thinking` of V3.1 and V3.2. Scalars."""

    def as_chat(self) -> Chat:
        if self.messages and self.messages[-1].role == "assistant":
            role = ("messages", len(self.messages) - 1, "role")
            raise FieldError(role, "must not be assistant in the last message: the model does not continue texts")
        blocks = ((i, j, it) for i, one in enumerate(self.messages) for j, it in enumerate(one.content))
        ignored = {f"messages[{i}].content[{j}]": it.type for i, j, it in blocks if isinstance(it, HostedBlock)}
        parallel = not self.tool_choice.disable_parallel_tool_use
        return chat.chat_of(self._turns(), self.tools, self.tool_choice.chosen(), parallel, self._arguments(), ignored)

    def ask(self, request_id: str) -> Ask:
        schema = self.output_config.format
        grammar = None if schema is None else schema.grammar()
        return self.as_ask(self.as_chat(), request_id, {}, ORIGINS, grammar=grammar)

    def _turns(self) -> Iterator[JsonObject]:
        if self.system:
            yield chat.message("system", _joined(self.system))
        for i, one in enumerate(self.messages):
            yield from one.turns(i)

    def _arguments(self) -> JsonObject:
        thinking = None if self.thinking is None else self.thinking.type != "disabled"
        if len({**self.chat_template_kwargs, **present({"thinking": thinking})}) > (most := chat.MAX_ARGUMENTS):
            raise FieldError("chat_template_kwargs", f"must have at most {most} entries with ", ("thinking",))
        return chat.template_arguments(self.chat_template_kwargs, thinking, self.output_config.format)


class Metadata(Strict):
    user_id: str | None = None
    """The session, unless the header x-session-id names one. At most 512 characters."""


class MessagesRequest(CountRequest):
    IGNORED: ClassVar = IGNORED

    max_tokens: int
    """With the prompt within the context."""
    stop_sequences: Items[str] = Field([])
    """At most 16 of 1 to 256 characters."""
    metadata: Metadata | None = None

    @property
    def shows_reasoning(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def ask(self, request_id: str) -> Ask:
        user = (self.metadata or Metadata()).user_id or ""
        return replace(super().ask(request_id), stop=self.stop_sequences, session_id=user)


def _joined(texts: list[TextBlock]) -> str:
    return "\n".join(block.text for block in texts)
