"""One continuation of a chat as it is read: its text apart into thoughts, answer and tool calls, and its counts."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from millrace_router.flow.inference import Answer
from millrace_router.flow.stream import Delta
from millrace_router.text.call_stream import CallDelta, CallParser
from millrace_router.text.chat_format import ChatFormat
from millrace_router.text.reasoning import ReasoningParser
from millrace_router.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Said:
    """New thoughts, text and tool calls."""

    thoughts: str = ""
    text: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class MessageParser:
    """Text deltas to parts of a message, whatever the cuts: reasoning first, then tool calls in the rest."""

    def __init__(self, form: ChatFormat, *, thinking: bool, tools: bool) -> None:
        """The prompt has begun the thoughts; the model may call tools."""
        self._reasoning = ReasoningParser(thinking, form.ends_thoughts) if form.reasons else None
        self._tools: CallParser | None = form.style.parser() if tools and form.style else None

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


class Reading:
    """`latest` has the counts so far, from the first delta on; `called`: there was a tool call."""

    def __init__(self, answer: Answer, tokenizer: Tokenizer, tools: bool) -> None:
        self._tokenizer = tokenizer
        self._parser = MessageParser(tokenizer.format, thinking=answer.thinking, tools=tools)
        self._thinking = answer.thinking and tokenizer.format.reasons
        self._before = 0  # tokens before the first thoughts, such as <think>
        self.latest: Delta
        self.cached_tokens = self.reasoning_tokens = 0
        self.called = False

    def read(self, delta: Delta) -> Said:
        self.latest, self.cached_tokens = delta, max(self.cached_tokens, delta.cached_tokens)
        said = self._parser.push(delta.text, last=bool(delta.finish_reason))
        self.called = self.called or bool(said.calls)
        if self._thinking or said.thoughts:
            ended = self._tokenizer.thoughts_end(delta.token_ids)
            self.reasoning_tokens += self._before + (len(delta.token_ids) if ended is None else ended)
            self._before, self._thinking = 0, ended is None
        elif not self.reasoning_tokens:
            self._before += len(delta.token_ids)
        return said


def call_id(call: CallDelta) -> str:
    """The model's own, or a new one."""
    return call.id or f"call_{secrets.token_hex(12)}"
