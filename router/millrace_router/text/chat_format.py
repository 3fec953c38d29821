"""The abilities of a model's chat format, derived from its template and vocabulary, and tools in that format.

DeepSeek's own templates render calls and their results, but none of them lists the tools. Where a template does not
take `tools`, the system message describes them in the words of DeepSeek's model cards.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jinja2
import jinja2.meta

from millrace_router.text.markers import CALL, CALL_END, CALL_SEP, CALLS, CALLS_END, THINK_END
from millrace_router.text.tool_calls import FENCE, KIND

MAX_SPACES = 8  # in a row, of arguments that a grammar writes


class Style(enum.Enum):
    V3 = enum.auto()  # and R1: arguments in a code block
    V31 = enum.auto()


@dataclass(frozen=True, slots=True)
class ChatFormat:
    style: Style | None = None  # of tool calls; None: the model has none
    takes_tools: bool = False  # the template describes them
    reasons: bool = False

    @classmethod
    def of(cls, template: str, tokens: Collection[str]) -> ChatFormat:
        """`tokens`: texts of the vocabulary. Raises jinja2.TemplateError."""
        style = None
        if CALLS in tokens or CALLS in template:
            style = Style.V3 if f"{FENCE}json" in template else Style.V31
        named = jinja2.meta.find_undeclared_variables(jinja2.Environment(extensions=EXTENSIONS).parse(template))
        return cls(style, "tools" in named, THINK_END in tokens)


EXTENSIONS = ["jinja2.ext.loopcontrols"]


class Tool(NamedTuple):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False

    def as_json(self) -> dict[str, Any]:
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}


def described(tools: Sequence[Tool], style: Style) -> str:
    """The description of tools for the system message."""
    parts = ["## Tools\nYou have access to the following tools:"]
    for tool in tools:
        schema = json.dumps(tool.parameters, ensure_ascii=False)
        parts.append(f"### {tool.name}\nDescription: {tool.description}\n\nParameters: {schema}")
    begin, end = _around("tool_call_name", style)
    parts.append(
        "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
        f"{CALLS}{begin}tool_call_arguments{end}{{additional_tool_calls}}{CALLS_END}\n\n"
        "Where:\n"
        "- `tool_call_name` must be an exact match to one of the available tools\n"
        "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
        "- For multiple tool calls, chain them directly without separators or spaces"
    )
    return "\n\n".join(parts)


def structural_tag(tools: Sequence[Tool], style: Style, *, required: bool, parallel: bool) -> str:
    """xgrammar's format for an output that calls these tools correctly; not `required`: or none of them."""
    tags = []
    for tool in tools:
        begin, end = _around(tool.name, style)
        content = {"type": "json_schema", "json_schema": tool.parameters, "max_whitespace_cnt": MAX_SPACES}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    calls = {
        "type": "tag",
        "begin": CALLS,
        "content": {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": "\n" if style is Style.V3 else "",
            "at_least_one": True,
            "stop_after_first": not parallel,
        },
        "end": CALLS_END,
    }
    text_or_calls = {"type": "triggered_tags", "triggers": [CALLS], "tags": [calls], "stop_after_first": True}
    return json.dumps({"type": "structural_tag", "format": calls if required else text_or_calls})


def _around(name: str, style: Style) -> tuple[str, str]:
    """The texts before and after a call's arguments."""
    if style is Style.V31:
        return f"{CALL}{name}{CALL_SEP}", CALL_END
    return f"{CALL}{KIND}{CALL_SEP}{name}\n{FENCE}json\n", f"\n{FENCE}{CALL_END}"
