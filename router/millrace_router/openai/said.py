"""A chat model's output as the OpenAI API shows it: thoughts, text and tool calls. Pure; see the two parsers."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace_router.text.reasoning import ReasoningParser
from millrace_router.text.tool_calls import CallDelta, ToolCallParser


@dataclass(slots=True)
class Said:
    """New thoughts, text and tool calls."""

    thoughts: str = ""
    text: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class MessageParser:
    """Text deltas to parts of a message, whatever the cuts: reasoning first, then tool calls in the rest."""

    def __init__(self, *, reasons: bool, thinking: bool, tools: bool) -> None:
        """The model can reason; the prompt has begun its thoughts; it may call tools."""
        self._reasoning = ReasoningParser(thinking) if reasons else None
        self._tools = ToolCallParser() if tools else None

    def push(self, text: str, last: bool) -> Said:
        said = Said(text=text)
        if self._reasoning is not None:
            said.thoughts, said.text = self._reasoning.push(text)
            if last:
                thoughts, text = self._reasoning.flush()
                said.thoughts, said.text = said.thoughts + thoughts, said.text + text
        if self._tools is not None:
            said.text, said.calls = self._tools.push(said.text)
            if last:
                text, calls = self._tools.flush()
                said.text, said.calls = said.text + text, said.calls + calls
        return said
