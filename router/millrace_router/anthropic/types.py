"""Requests of the Messages API, and how they become a request of chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from millrace_router.flow.validate import invalid
from millrace_router.openai.chat import AnyTool
from millrace_router.openai.tool_parameters import Parameters
from millrace_router.openai.translated import Lenient, Translated
from millrace_router.openai.types import Items, JsonSchema, Strict


class TextBlock(Lenient):
    type: Literal["text"]
    text: str


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Texts = Annotated[Items[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])]


class ThinkingBlock(Lenient):
    """`signature` is not looked at."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Lenient):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Lenient):
    """`is_error` is not shown to the model: the content says it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field([])
    is_error: bool = False


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


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | HostedBlock, Field(discriminator="type")]
Content = Annotated[Items[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])]
BLOCKS = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock, HostedBlock),
    "system": (TextBlock,),
}


class InputMessage(Strict):
    role: Literal["user", "assistant", "system"]
    content: Content

    def turns(self, i: int) -> Iterator[dict[str, Any]]:
        """As turns of chat."""
        for j, block in enumerate(self.content):
            if not isinstance(block, BLOCKS[self.role]):
                raise invalid("messages", f"[{i}].content[{j}]: a {self.role} has no {block.type}")
        texts = [block.text for block in self.content if isinstance(block, TextBlock)]
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _joined(block.content)}
        if self.role == "assistant":
            thoughts = "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock))
            calls = [_call(block) for block in self.content if isinstance(block, ToolUseBlock)]
            said = {"content": "".join(texts), "reasoning_content": thoughts, "tool_calls": calls}
            yield {"role": "assistant", **said}
        elif texts:
            yield {"role": self.role, "content": "\n".join(texts)}


class CustomTool(AnyTool):
    """`type` absent: custom. All tools are seen at once, so `defer_loading` is ignored; nothing but the model calls."""

    SERVED: ClassVar = frozenset({"custom", "function"})

    type: str = "custom"
    name: str
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # a grammar decides it: strict tools stream
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None

    def as_function(self) -> dict[str, Any]:
        """As a tool of chat."""
        if not self.served:
            return {"type": self.type}
        about = {"description": self.description, "parameters": self.input_schema, "strict": self.strict}
        return {"type": "function", "function": {"name": self.name, **about}}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None  # of type tool
    disable_parallel_tool_use: bool = False


class ThinkingConfig(Strict):
    """`budget_tokens` is not enforced: `max_tokens` bounds thoughts and answer. `omitted`: no thoughts are sent."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(JsonSchema):
    type: Literal["json_schema"]


class OutputConfig(Strict):
    """`effort` is ignored: the model knows none."""

    effort: str | None = None
    format: OutputFormat | None = None


IGNORED = {"cache_control", "context_management", "diagnostics", "inference_geo", "service_tier", "speed"}


class CountRequest(Translated):
    """What makes the prompt. The rest of a message's request may be there, too."""

    IGNORED: ClassVar = frozenset(IGNORED | {"max_tokens", "metadata", "stop_sequences"})
    UNSUPPORTED: ClassVar = {
        "container": "nothing is run here",
        "mcp_servers": "the model has no network; give tools and run them yourself",
        "thread": "this server keeps nothing: send the whole conversation as messages",
    }
    NAMES: ClassVar = {"stop": "stop_sequences", "response_format": "output_config"}

    messages: Items[InputMessage]
    system: Texts = Field([])
    tools: Items[CustomTool] = Field([])
    tool_choice: ToolChoice = ToolChoice()
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = OutputConfig()

    @property
    def ignored(self) -> dict[str, str]:
        blocks = ((i, j, it) for i, message in enumerate(self.messages) for j, it in enumerate(message.content))
        return {f"messages[{i}].content[{j}]": it.type for i, j, it in blocks if isinstance(it, HostedBlock)}

    def conversation(self) -> dict[str, Any]:
        if self.messages and self.messages[-1].role == "assistant":
            raise invalid("messages", "must not end with one of the assistant: the model does not continue texts")
        system = [{"role": "system", "content": _joined(self.system)}] if self.system else []
        form = self.output_config.format
        return {
            "messages": [*system, *(turn for i, message in enumerate(self.messages) for turn in message.turns(i))],
            "tools": [tool.as_function() for tool in self.tools],
            "tool_choice": self._choice(),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "response_format": {"type": "json_schema" if form is not None else "text", "json_schema": form},
            **self.shared(self.thinking.type != "disabled" if self.thinking is not None else None),
        }

    def _choice(self) -> str | dict[str, Any]:
        choice = self.tool_choice
        if (choice.name is not None) is not (choice.type == "tool"):
            needed = "is required" if choice.name is None else "has no meaning"
            raise invalid("tool_choice", f".name {needed} with type {choice.type}")
        if choice.name is not None:
            return {"type": "function", "function": {"name": choice.name}}
        return {"any": "required"}.get(choice.type, choice.type)


class Metadata(Strict):
    user_id: str | None = None  # the session, unless the header x-session-id names one


class MessagesRequest(CountRequest):
    IGNORED: ClassVar = frozenset(IGNORED)

    max_tokens: int
    stop_sequences: Items[str] = Field([])
    metadata: Metadata | None = None

    @property
    def shows_thoughts(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def conversation(self) -> dict[str, Any]:
        user = self.metadata and self.metadata.user_id
        return super().conversation() | {"max_tokens": self.max_tokens, "stop": self.stop_sequences, "user": user}


def _joined(texts: list[TextBlock]) -> str:
    return "\n".join(block.text for block in texts)


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "function": {"name": block.name, "arguments": arguments}}
