"""The abilities of a model's chat format, derived from its template and vocabulary, and tools in that format.

Kimi's template lists the tools. DeepSeek's own templates render calls and their results, but do not list the tools.
Where a template does not take `tools`, the system message describes them in the words of DeepSeek's model cards.
"""

import enum
import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jinja2.meta
from millrace_common.json_values import Json, JsonObject
from millrace_rpc.errors import Path

from millrace_router.text import dsml
from millrace_router.text.call_stream import CallParser, ListMarks, Offer
from millrace_router.text.limited_template import LimitedEnvironment
from millrace_router.text.markers import DEEPSEEK, DSML, KIMI, THINK_END
from millrace_router.text.tool_calls import FENCE, KIND, MarkedCall


class Style(enum.Enum):
    """How a model writes tool calls."""

    V3 = enum.auto()  # and R1: arguments in a code block
    V31 = enum.auto()
    V32 = enum.auto()  # DSML
    KIMI = enum.auto()

    @classmethod
    def found_in(cls, text: str | Collection[str], template: str) -> "Style | None":
        """`text`: the template or the vocabulary."""
        if KIMI.calls in text:
            return cls.KIMI
        if DSML in text:
            return cls.V32
        if DEEPSEEK.calls in text:
            return cls.V3 if f"{FENCE}json" in template else cls.V31
        return None

    def parser(self, offer: Offer) -> CallParser:
        if self is Style.V32:
            return CallParser(dsml.MARKS, functools.partial(dsml.DsmlCall, offer), offer)
        marks, ids = (KIMI, {*offer.ids}) if self is Style.KIMI else (DEEPSEEK, None)
        listed = ListMarks((marks.calls,), marks.call, marks.call_end, marks.calls_end)
        return CallParser(listed, functools.partial(MarkedCall, marks, offer, ids), offer)


OURS = frozenset({"thinking", "response_format"})  # arguments that other fields of a request give every template
NOT_CLIENTS = {"add_generation_prompt", "bos_token", "eos_token", "messages", "tools"}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    style: Style | None = None  # None: the model has no tool calls
    takes_tools: bool = False  # the template describes them
    reasons: bool = False
    arguments: Collection[str] = OURS  # that a client may give its template

    @property
    def ends_reasoning(self) -> tuple[str, ...]:
        """What ends a model's reasoning besides </think>."""
        return (KIMI.calls,) if self.style is Style.KIMI else ()

    @classmethod
    def of(cls, template: str, tokens: Collection[str]) -> "ChatFormat":
        """`tokens`: texts of the vocabulary. What the template uses goes first, because vocabularies keep the tokens of
        older formats. Raises jinja2.TemplateError.
        """
        style = Style.found_in(template, template) or Style.found_in(tokens, template)
        named = jinja2.meta.find_undeclared_variables(LimitedEnvironment(extensions=EXTENSIONS).parse(template))
        return cls(style, "tools" in named, THINK_END in tokens, named - NOT_CLIENTS | OURS)


EXTENSIONS = ["jinja2.ext.loopcontrols"]


class Tool(NamedTuple):
    """A function that the model may call. `parameters` is a JSON schema. `path`: where the request describes it."""

    name: str
    description: str | None  # None: not given, and not shown
    parameters: Mapping[str, Json]
    strict: bool = False
    path: Path = ()

    def as_json(self) -> JsonObject:
        about = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": self.parameters}}


def described(tools: Sequence[Tool], style: Style) -> str:
    """The description of tools for the system message."""
    parts = ["## Tools\nYou have access to the following tools:"]
    for tool in tools:
        schema = json.dumps(tool.parameters, ensure_ascii=False)
        parts.append(f"### {tool.name}\nDescription: {tool.description or ''}\n\nParameters: {schema}")
    parts.append(
        "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
        f"{_example(style)}\n\n"
        "Where:\n"
        "- `tool_call_name` must be an exact match to one of the available tools\n"
        "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
        "- For multiple tool calls, chain them directly without separators or spaces"
    )
    return "\n\n".join(parts)


def _example(style: Style) -> str:
    begin, separator, end = list_of_calls(style)
    call, call_end = around_arguments("tool_call_name", style)
    parameter = f'{dsml.PARAMETER} name="parameter_name" string="true|false">parameter_value{dsml.PARAMETER_END}\n'
    arguments = {Style.V32: parameter, Style.KIMI: f"0{KIMI.sep}tool_call_arguments"}.get(style, "tool_call_arguments")
    return f"{begin}{call}{arguments}{call_end}{separator}{{additional_tool_calls}}{end}"


def list_of_calls(style: Style) -> tuple[str, str, str]:
    """The texts before, between and after calls."""
    match style:
        case Style.KIMI:
            return KIMI.calls, "", KIMI.calls_end
        case Style.V32:
            return f"{dsml.CALLS}\n", "\n", f"\n{dsml.CALLS_END}"
        case Style.V3 | Style.V31:
            return DEEPSEEK.calls, "\n" if style is Style.V3 else "", DEEPSEEK.calls_end


def around_arguments(name: str, style: Style) -> tuple[str, str]:
    """The texts before and after a call's arguments; Kimi's begin with the number of the call."""
    match style:
        case Style.V3:
            return f"{DEEPSEEK.call}{KIND}{DEEPSEEK.sep}{name}\n{FENCE}json\n", f"\n{FENCE}{DEEPSEEK.call_end}"
        case Style.V31:
            return f"{DEEPSEEK.call}{name}{DEEPSEEK.sep}", DEEPSEEK.call_end
        case Style.V32:
            return f'{dsml.CALL} name="{name}">\n', dsml.CALL_END
        case Style.KIMI:
            return f"{KIMI.call}functions.{name}:", KIMI.call_end
