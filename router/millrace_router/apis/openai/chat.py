"""The request of /v1/chat/completions: turns, tools, and how they become an `Ask`."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, NamedTuple, Self, cast

from millrace_common.json_values import Json, JsonObject
from millrace_common.quoted import cut
from millrace_rpc.errors import FieldError, Path
from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, Tag, ValidationInfo, model_validator

from millrace_router.apis.openai.types import Common, JsonSchema, Strict, present
from millrace_router.apis.parsing import HABITS, Items, OneOf, String, at_most, mistake, note_hint
from millrace_router.apis.tool_parameters import Parameters
from millrace_router.flow.ask import Ask, Chat
from millrace_router.text.call_arguments import NONE
from millrace_router.text.call_grammar import Calls
from millrace_router.text.chat_format import ChatFormat, Tool

MAX_ARGUMENTS = 16  # of a chat template
CONTINUED = "the model does not continue texts"


class TextPart(Strict):
    IGNORED: ClassVar = HABITS | {"annotations", "id", "logprobs", "status"}

    type: Literal["text"]
    text: str


def _as_text(arguments: Json) -> Json:
    """Clients also send the object itself, and models without arguments an empty text or null."""
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    return NONE if isinstance(arguments, str) and arguments.strip() in ("", "null") else arguments


CallArguments = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | JsonObject)]


class CalledFunction(Strict):
    IGNORED: ClassVar = HABITS | {"parsed_arguments"}

    name: str
    arguments: CallArguments = NONE
    """JSON text, or the object. One that is no object, for example because it was cut off, is shown as it is."""


class CalledTool(Strict):
    """As answers have it; streams number calls with `index`."""

    IGNORED: ClassVar = HABITS | {"extra_content", "index", "status"}

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


def message(role: str, text: str, calls: Sequence[JsonObject] = (), **more: str | None) -> JsonObject:
    """A turn in the form for chat templates. Of calls without a text the content is None."""
    made: JsonObject = {"role": role, "content": text}
    if calls:
        made |= {"tool_calls": list(calls), "content": text or None}
    return made | {name: value for name, value in more.items() if value}


def called(id: str, name: str, arguments: str) -> JsonObject:
    """A call in a turn of the assistant. `arguments`: JSON text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Turn(Strict):
    IGNORED: ClassVar = HABITS | {"annotations", "id", "parsed", "refusal", "status"}
    UNSUPPORTED: ClassVar = {
        "audio": "only text is read",
        "function_call": "use tool_calls",
        "partial": CONTINUED,
        "prefix": CONTINUED,
        "reasoning": "send it as reasoning_content",
    }

    role: str
    """`system`, `developer` (as system), `user`, `assistant` or `tool`."""
    content: OneOf[String | Items[TextPart]] | None = None
    """Text; images and audio are refused. The assistant's may be absent."""
    name: str | None = None
    """For templates that show it (Kimi K2): the sender, or the function of a result."""
    tool_calls: Items[CalledTool] | None = None
    """Of the assistant."""
    tool_call_id: str | None = None
    """Of a tool: the call that this is the result of."""
    reasoning_content: str | None = None
    """Earlier reasoning, for templates that show it (Kimi K2 Thinking, V3.2)."""

    def as_message(self, i: int) -> JsonObject:
        text = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        calls = [called(it.id, it.function.name, it.function.arguments) for it in self.tool_calls or ()]
        if self.content is None and self.role != "assistant":
            raise FieldError(("messages", i, "content"), "is required")
        if calls and self.role != "assistant":
            raise FieldError(("messages", i, "tool_calls"), f"are for the role assistant, not {cut(self.role)!r}")
        more = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        return message(self.role, text, calls, **more)


class Function(Strict):
    IGNORED: ClassVar = HABITS | {"additionalProperties"}

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: Parameters | None = None
    """A JSON schema of an object. Absent: the function has none."""
    strict: bool | None = None
    """The arguments follow the schema."""

    def tool(self, path: Path) -> Tool:
        parameters = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        return Tool(self.name, self.description, parameters, bool(self.strict), path)


class AnyTool(Strict):
    """A tool of a type that is not in `SERVED` is left out. Of it only the type and the hint about caches are read."""

    SERVED: ClassVar[frozenset[str]] = frozenset({"function"})

    type: str = Field(examples=["function"])
    """Others than `function` are left out and named in the answer; with `strict_tools` refused."""

    @property
    def served(self) -> bool:
        return self.type in self.SERVED

    @abstractmethod
    def as_tool(self, i: int) -> Tool:
        """`i`: its place among the tools of the request."""

    @model_validator(mode="wrap")
    @classmethod
    def _of_any_type(cls, value: Json, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in cls.SERVED:
            note_hint(value, info.context)
            return cast("Self", cls.model_construct(type=kind))
        return handler(value)


class FunctionTool(AnyTool):
    IGNORED: ClassVar = HABITS | {"additionalProperties"}
    UNSUPPORTED: ClassVar = {"strict": "it is a field of function"}

    function: Function

    def as_tool(self, i: int) -> Tool:
        return self.function.tool(("tools", i, "function"))


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


ByName = Annotated[NamedTool, Tag("an object")]


def _scalar(value: Json) -> Json:
    if isinstance(value, list | dict):
        raise mistake("must be a string, a number or a boolean")
    return value


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Choice = Annotated[Literal["none", "auto", "required"], Tag("a string")]
Scalar = Annotated[Json, BeforeValidator(_scalar, json_schema_input_type=str | bool | int | float | None)]
Arguments = Annotated[dict[str, Scalar], Field(max_length=MAX_ARGUMENTS), at_most(MAX_ARGUMENTS)]


class ChosenTools(NamedTuple):
    """The tools that a request may, or has to call. `path`: of the name of the only one."""

    how: str  # none, auto, required, and other words for auto
    name: str | None = None
    path: Path = ()

    @classmethod
    def of(cls, choice: str | NamedTool | FunctionName, path: Path) -> "ChosenTools":
        if isinstance(choice, str):
            return cls(choice)
        return cls("required", choice.function.name if isinstance(choice, NamedTool) else choice.name, path)

    def required(self, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        if self.name is not None:
            named = tuple(tool for tool in tools if tool.name == self.name)
            if not named:
                raise FieldError(self.path, f"{cut(self.name)!r} is not among the ", ("tools",))
            return named[:1]
        if self.how == "required" and not tools:
            raise FieldError("tool_choice", "is required, but there are no ", ("tools",))
        return tools if self.how == "required" else ()


def chat_of(
    messages: Iterable[Mapping[str, Json]],
    tools: Sequence[AnyTool],
    choice: ChosenTools,
    parallel: bool,
    arguments: Mapping[str, Json],
    ignored: Mapping[str, str] | None = None,
) -> Chat:
    """The conversation of a request of any API. `ignored`: what is left out of it besides tools, as in `Chat`."""
    offered = tuple(tool.as_tool(i) for i, tool in enumerate(tools) if tool.served and choice.how != "none")
    unknown = {f"tools[{i}]": tool.type for i, tool in enumerate(tools) if not tool.served}
    required = choice.required(offered)
    return Chat(tuple(messages), offered, required, parallel, arguments, {**(ignored or {}), **unknown})


def template_arguments(given: Mapping[str, Json], thinking: bool | None, schema: JsonSchema | None) -> JsonObject:
    """`given` by the request, which go before what its other fields say."""
    shown = None if schema is None else schema.shown()
    return {**present({"thinking": thinking, "response_format": shown}), **given}


def thinks(effort: Effort | None) -> bool | None:
    return None if effort is None else effort not in ("none", "minimal")


class Conversation(Strict):
    """The input of the chat template. `chat_template_kwargs`, an extension, are its own arguments."""

    messages: Items[Turn]
    """Not empty."""
    tools: Items[FunctionTool] = Field([])
    """At most 128. Refused when the template and vocabulary of the model have no calls."""
    tool_choice: OneOf[Choice | ByName] = "auto"
    """`required` and a name make the output a call."""
    parallel_tool_calls: bool = True
    """False: the output ends with the first call."""
    chat_template_kwargs: Arguments = Field({})
    """Beyond OpenAI: arguments that the template has, such as `thinking` of V3.1 and V3.2. Scalars."""

    def as_chat(self) -> Chat:
        choice = ChosenTools.of(self.tool_choice, ("tool_choice", "function", "name"))
        messages = (turn.as_message(i) for i, turn in enumerate(self.messages))
        return chat_of(messages, self.tools, choice, self.parallel_tool_calls, self.chat_template_kwargs)


class ChatRequest(Conversation, Common):
    max_completion_tokens: int | None = None
    """Goes before `max_tokens`."""
    modalities: Items[Literal["text"]] = Field([])
    reasoning_effort: Effort | None = None
    """`none` and `minimal`: the argument `thinking` of the template is false, else true. DeepSeek knows no degrees."""
    logprobs: bool = False
    r"""Of the distribution before all changes to it. A part of a character is `\xe2\x80`. `bytes` of all entries are
    the output's: a special token that is not shown has none.
    """
    top_logprobs: int | None = None
    """With `logprobs`."""

    def as_chat(self) -> Chat:
        chat, schema = super().as_chat(), self.response_format.schema_of
        return chat._replace(arguments=template_arguments(chat.arguments, thinks(self.reasoning_effort), schema))

    def ask(self, request_id: str) -> Ask:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "needs ", ("logprobs",), " to be true")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        ask = self.ask_for(self.as_chat(), request_id, max_tokens, logprobs)
        origins: dict[Path, Path] = {("prompt",): ("messages",), ("logprobs",): ("top_logprobs",)}
        if self.max_completion_tokens is not None:
            origins["max_tokens",] = ("max_completion_tokens",)
        return replace(ask, origins={**ask.origins, **origins})


def in_format(ask: Ask, form: ChatFormat) -> Ask:
    """Add the calls that must be right: required and strict ones, and those in the place of an answer that must. Raises
    INVALID_ARGUMENT when the model has no calls, or its template not all arguments.
    """
    chat = ask.prompt
    if isinstance(chat, Chat) and (unknown := chat.arguments.keys() - form.arguments):
        raise FieldError(("chat_template_kwargs", min(unknown)), "is no argument of the model's chat template")
    if not isinstance(chat, Chat) or not chat.tools:
        return ask
    if form.style is None:
        raise FieldError("tools", "are not supported: the model's chat template has no tool calls")
    if chat.required or ask.grammar is not None or any(tool.strict for tool in chat.tools):
        named = len(chat.required) == 1 and len(chat.tools) > 1
        answer = None if chat.required else ask.grammar
        tools, parallel = chat.required or chat.tools, chat.parallel and not named
        calls = Calls(form.style, tools, bool(chat.required), parallel, answer)
        origins = ask.origins if answer else {**ask.origins, ("grammar",): ("tools",)}
        return replace(ask, grammar=None, calls=calls, origins=origins)
    return ask
