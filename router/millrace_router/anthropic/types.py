"""Requests of the Messages API, and how they become a request of chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from millrace_common.quoted import cut
from millrace_rpc.errors import Path
from pydantic import Field

from millrace_router.flow.validate import invalid
from millrace_router.openai.chat import AnyTool, Function
from millrace_router.openai.parsing import HABITS, Items, OfType, or_text
from millrace_router.openai.tool_parameters import Parameters
from millrace_router.openai.translated import Lenient, Translated
from millrace_router.openai.types import JsonSchema, Strict


class TextBlock(Lenient):
    type: Literal["text"]
    text: str


def _as_block(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


Texts = Annotated[Items[TextBlock], or_text(_as_block, list[TextBlock])]


class ThinkingBlock(Lenient):
    """`signature` is not looked at."""

    type: Literal["thinking"]
    thinking: str
    """For templates that show earlier thoughts. No signature is looked at."""


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

    def turns(self, i: int) -> Iterator[tuple[dict[str, Any], dict[Path, Path]]]:
        """As turns of chat, and where the parts of each come from."""
        at: Path = ("messages", i)
        for j, block in enumerate(self.content):
            if not isinstance(block, BLOCKS[self.role]):
                path = (*at, "content", j, "type")
                raise invalid(path, f"must not be {cut(block.type)!r} in a message of the {self.role}")
        texts = [block.text for block in self.content if isinstance(block, TextBlock)]
        for j, block in enumerate(self.content):
            if isinstance(block, ToolResultBlock):
                told = {"role": "tool", "tool_call_id": block.tool_use_id, "content": _joined(block.content)}
                yield told, {(): (*at, "content", j), ("tool_call_id",): (*at, "content", j, "tool_use_id")}
        if self.role == "assistant":
            thoughts = "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock))
            calls = [(j, block) for j, block in enumerate(self.content) if isinstance(block, ToolUseBlock)]
            said = {"content": "".join(texts), "reasoning_content": thoughts}
            origins: dict[Path, Path] = {(): at}
            for k, (j, _) in enumerate(calls):
                origins["tool_calls", k] = origins["tool_calls", k, "function"] = (*at, "content", j)
                origins["tool_calls", k, "function", "arguments"] = (*at, "content", j, "input")
            yield {"role": "assistant", **said, "tool_calls": [_call(block) for _, block in calls]}, origins
        elif texts:
            yield {"role": self.role, "content": "\n".join(texts)}, {(): at}


class CustomTool(AnyTool):
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

    def as_function(self) -> dict[str, Any]:
        """As a tool of chat."""
        if not self.served:
            return {"type": self.type}
        about = {"description": self.description, "parameters": self.input_schema, "strict": self.strict}
        named: dict[str, Any] = {"name": self.name, **about}
        return {"type": "function", "function": Function.model_construct(**named)}  # chat's names are shorter


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    """With type `tool`."""
    disable_parallel_tool_use: bool = False
    """The output ends with the first call."""


class ThinkingConfig(Strict):
    """`budget_tokens` is not enforced: `max_tokens` bounds thoughts and answer. `omitted`: no thoughts are sent."""

    type: Literal["enabled", "disabled", "adaptive"]
    """The argument `thinking` of the template is false with `disabled`, else true."""
    budget_tokens: int | None = None
    """Not enforced: `max_tokens` bounds thoughts and answer."""
    display: Literal["summarized", "omitted"] | None = None
    """`omitted`: no thoughts are sent."""


class OutputFormat(JsonSchema):
    type: Literal["json_schema"]


class OutputConfig(Strict):
    """`effort` is ignored: the model knows none."""

    effort: str | None = None
    """Changes nothing."""
    format: OutputFormat | None = None


IGNORED = HABITS | {
    "billing_policy", "context_management", "diagnostics", "inference_geo", "service_tier", "speed", "user_profile_id",
    "workspace_id",
}  # fmt: skip


class CountRequest(Translated):
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

    @property
    def ignored(self) -> dict[str, str]:
        blocks = ((i, j, it) for i, message in enumerate(self.messages) for j, it in enumerate(message.content))
        return {f"messages[{i}].content[{j}]": it.type for i, j, it in blocks if isinstance(it, HostedBlock)}

    def conversation(self) -> dict[str, Any]:
        if self.messages and self.messages[-1].role == "assistant":
            role = ("messages", len(self.messages) - 1, "role")
            raise invalid(role, "must not be assistant in the last message: the model does not continue texts")
        form = self.output_config.format
        return {
            "messages": [turn for turn, _ in self._turns()],
            "tools": [tool.as_function() for tool in self.tools],
            "tool_choice": self._choice(),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "response_format": {"type": "json_schema" if form is not None else "text", "json_schema": form},
            **self.shared(self.thinking.type != "disabled" if self.thinking is not None else None),
        }

    def _turns(self) -> Iterator[tuple[dict[str, Any], dict[Path, Path]]]:
        if self.system:
            yield {"role": "system", "content": _joined(self.system)}, {(): ("system",)}
        for i, message in enumerate(self.messages):
            yield from message.turns(i)

    def origins(self) -> dict[Path, Path]:
        made: dict[Path, Path] = {
            ("stop",): ("stop_sequences",),
            ("user",): ("metadata", "user_id"),
            ("response_format",): ("output_config", "format"),
            ("response_format", "json_schema"): ("output_config", "format"),
            ("tool_choice", "function"): ("tool_choice",),
        }
        for i in range(len(self.tools)):
            made["tools", i, "function"] = ("tools", i)
            made["tools", i, "function", "parameters"] = ("tools", i, "input_schema")
        for i, (_, parts) in enumerate(self._turns()):
            made |= {("messages", i, *part): origin for part, origin in parts.items()}
        return made

    def _choice(self) -> str | dict[str, Any]:
        choice = self.tool_choice
        if (choice.name is not None) is not (choice.type == "tool"):
            needed = "is required" if choice.name is None else "has no meaning"
            raise invalid(("tool_choice", "name"), f"{needed} with type {choice.type}")
        if choice.name is not None:
            return {"type": "function", "function": {"name": choice.name}}
        return {"any": "required"}.get(choice.type, choice.type)


class Metadata(Strict):
    user_id: str | None = None
    """The session, unless the header x-session-id names one. At most 512 characters."""


class MessagesRequest(CountRequest):
    IGNORED: ClassVar = IGNORED

    max_tokens: int
    """With the prompt within the context."""
    stop_sequences: Items[str] = Field([])
    """At most 16 (`limits.stop`) of 1 to 256 characters."""
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
