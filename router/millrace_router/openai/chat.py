"""The request of /v1/chat/completions: turns, tools, and how they become an `Ask`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, model_validator

from millrace_router.flow.ask import Ask, Chat
from millrace_router.flow.validate import invalid
from millrace_router.openai.tool_parameters import Parameters
from millrace_router.openai.types import Common, Items, Strict
from millrace_router.text.call_arguments import NONE
from millrace_router.text.call_grammar import Calls
from millrace_router.text.chat_format import ChatFormat, Tool

MAX_ARGUMENTS = 16  # of a chat template
MOST_TOKENS = "max_completion_tokens"  # OpenAI's newer name of max_tokens


class Cacheable(Strict):
    """`cache_control` is ignored: prefixes are cached anyway. Clients of several vendors send it to all."""

    cache_control: dict[str, Any] | None = None


class TextPart(Cacheable):
    type: Literal["text"]
    text: str


def _as_text(arguments: Any) -> Any:
    """Clients also send the object itself, and models without arguments an empty text or null."""
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    return NONE if isinstance(arguments, str) and arguments.strip() in ("", "null") else arguments


CallArguments = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | dict[str, Any])]


class CalledFunction(Strict):
    """`arguments`: JSON text. One that is no object, for example because it was cut off, is shown as it is."""

    name: str
    arguments: CallArguments = NONE


class CalledTool(Strict):
    """`index` is what streams number calls with; clients send it back with the rest."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Turn(Cacheable):
    """Templates of models that think between calls (Kimi K2 Thinking, V3.2) read `reasoning_content`, Kimi K2's read
    `name`: the sender's, or the function's of a result.
    """

    role: str
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None  # OpenAI's answers have them, templates do not show them

    def as_message(self, i: int) -> dict[str, Any]:
        """The form for chat templates."""
        text = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        calls = [call.model_dump(exclude={"index"}) for call in self.tool_calls or ()]
        if self.content is None and self.role != "assistant":
            raise invalid("messages", f"[{i}].content is required")
        if calls and self.role != "assistant":
            raise invalid("messages", f"[{i}].tool_calls are for the role assistant, not {self.role!r}")
        message: dict[str, Any] = {"role": self.role, "content": text}
        if calls:
            message |= {"tool_calls": calls, "content": text or None}
        more = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        return message | {name: value for name, value in more.items() if value}


class Function(Strict):
    """`parameters` absent: the function has none."""

    name: str
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class AnyTool(Cacheable):
    """A tool of a type that is not in `SERVED` is left out. Of it only the type is read."""

    SERVED: ClassVar[frozenset[str]] = frozenset({"function"})

    type: str

    @property
    def served(self) -> bool:
        return self.type in self.SERVED

    @model_validator(mode="wrap")
    @classmethod
    def _of_any_type(cls, value: Any, handler: ModelWrapValidatorHandler[AnyTool]) -> AnyTool:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in cls.SERVED:
            return cls.model_construct(type=kind)
        return handler(value)


class FunctionTool(AnyTool):
    function: Function

    def as_tool(self, position: int) -> Tool:
        about = self.function
        parameters = {"type": "object", "properties": {}} if about.parameters is None else about.parameters
        return Tool(about.name, about.description, parameters, bool(about.strict), position)


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


def _few(arguments: Any) -> Any:
    """Refuse too many arguments before each of them is checked."""
    if isinstance(arguments, dict) and len(arguments) > MAX_ARGUMENTS:
        raise ValueError(f"at most {MAX_ARGUMENTS} of them, not {len(arguments)}")
    return arguments


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Scalar = str | bool | int | float | None
Arguments = Annotated[dict[str, Scalar], Field(max_length=MAX_ARGUMENTS), BeforeValidator(_few)]


class Conversation(Strict):
    """The input of the chat template. `chat_template_kwargs`, an extension, are its own arguments."""

    messages: Items[Turn]
    tools: Items[FunctionTool] = Field([])
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Arguments = Field({})

    def as_chat(self) -> Chat:
        served = [] if self.tool_choice == "none" else [(i, tool) for i, tool in enumerate(self.tools) if tool.served]
        tools = tuple(tool.as_tool(i) for i, tool in served)
        ignored = {f"tools[{i}]": tool.type for i, tool in enumerate(self.tools) if not tool.served}
        messages = tuple(turn.as_message(i) for i, turn in enumerate(self.messages))
        required = self._required(tools)
        return Chat(messages, tools, required, self.parallel_tool_calls, self.chat_template_kwargs, ignored)

    def _required(self, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            named = tuple(tool for tool in tools if tool.name == name)
            if not named:
                raise invalid("tool_choice", f"names {name!r}, which is not among the tools")
            return named[:1]
        if self.tool_choice == "required" and not tools:
            raise invalid("tool_choice", "is required, but there are no tools")
        return tools if self.tool_choice == "required" else ()


class ChatRequest(Conversation, Common):
    """`reasoning_effort`: thoughts or none, for templates that have the choice."""

    max_completion_tokens: int | None = None
    modalities: Items[Literal["text"]] = Field([])
    reasoning_effort: Effort | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    def as_chat(self) -> Chat:
        chat, shown, effort = super().as_chat(), self.response_format.shown(), self.reasoning_effort
        thinking = None if effort is None else effort not in ("none", "minimal")
        more = {"thinking": thinking, "response_format": shown}
        given = {name: value for name, value in more.items() if value is not None}
        return chat._replace(arguments={**given, **chat.arguments}) if given else chat

    def ask(self, request_id: str, ignored: Mapping[str, str] | None = None) -> Ask:
        """`ignored`: what was left out of the request that became this one."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs to be true")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        chat = self.as_chat()
        if ignored:
            chat = chat._replace(ignored={**ignored, **chat.ignored})
        ask = self.as_ask(chat, request_id, max_tokens, (self.top_logprobs or 0) if self.logprobs else None)
        names = {"logprobs": "top_logprobs"}
        return replace(ask, names=names if self.max_completion_tokens is None else names | {"max_tokens": MOST_TOKENS})


def in_format(ask: Ask, form: ChatFormat) -> Ask:
    """Add the calls that must be right: required and strict ones, and those in the place of an answer that must. Raises
    INVALID_ARGUMENT when the model has no calls.
    """
    chat = ask.prompt
    if not isinstance(chat, Chat) or not chat.tools:
        return ask
    if form.style is None:
        raise invalid("tools", "are not supported: the model's chat template has no tool calls")
    if chat.required or ask.grammar is not None or any(tool.strict for tool in chat.tools):
        named = len(chat.required) == 1 and len(chat.tools) > 1
        answer = None if chat.required else ask.grammar
        tools, parallel = chat.required or chat.tools, chat.parallel and not named
        calls = Calls(form.style, tools, bool(chat.required), parallel, answer)
        return replace(ask, grammar=None, calls=calls, grammar_param=ask.grammar_param if answer else "tools")
    return ask
