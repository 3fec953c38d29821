"""What a model says, apart into thoughts, content and tool calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from millrace_router.text.call_stream import CallDelta, CallParser
from millrace_router.text.chat_format import ChatFormat
from millrace_router.text.markers import StopMatcher
from millrace_router.text.reasoning import ReasoningParser


@dataclass(slots=True)
class Said:
    """New thoughts, and what follows them: content and parts of calls, in their order."""

    thoughts: str = ""
    parts: list[str | CallDelta] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The content. A plain text is nothing else."""
        return "".join([part for part in self.parts if isinstance(part, str)])

    @property
    def calls(self) -> list[CallDelta]:
        return [part for part in self.parts if isinstance(part, CallDelta)]


def joined(said: Sequence[Said]) -> Said:
    """One after the other, with one part for each text and each call."""
    if len(said) == 1:
        return said[0]
    parts = itertools.chain.from_iterable(one.parts for one in said)
    runs = (list(run) for _, run in itertools.groupby(parts, _call_index))
    return Said("".join([one.thoughts for one in said]), [_one(run) for run in runs])


def _call_index(part: str | CallDelta) -> int | None:
    return part.index if isinstance(part, CallDelta) else None


def _one(run: Sequence[str | CallDelta]) -> str | CallDelta:
    """Texts, or the parts of one call."""
    arguments = "".join([part if isinstance(part, str) else part.arguments for part in run])
    return arguments if isinstance(run[0], str) else replace(run[0], arguments=arguments)


class MessageParser:
    """Text deltas to parts of a message, whatever the cuts: reasoning first, then tool calls in the rest."""

    def __init__(self, form: ChatFormat, *, thinking: bool, tools: bool) -> None:
        """The prompt has begun the thoughts; the model may call tools."""
        self._reasoning = ReasoningParser(thinking, form.ends_thoughts) if form.reasons else None
        self._tools: CallParser | None = form.style.parser() if tools and form.style else None

    @classmethod
    def of_plain_text(cls) -> MessageParser:
        """All of it is content."""
        return cls(ChatFormat(), thinking=False, tools=False)

    @property
    def called(self) -> bool:
        """A call has ended."""
        return self._tools is not None and self._tools.called

    def push(self, text: str, last: bool) -> Said:
        thoughts = ""
        if self._reasoning is not None:
            thoughts, text = self._reasoning.push(text)
            if last:
                more, rest = self._reasoning.flush()
                thoughts, text = thoughts + more, text + rest
        if self._tools is None:
            return Said(thoughts, [text] if text else [])
        parts = self._tools.push(text)
        return Said(thoughts, parts + self._tools.flush() if last else parts)


class ContentStop:
    """Stop strings of the content. Thoughts and calls have none, and part the texts around them."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._matcher = StopMatcher(stops)

    @property
    def matched(self) -> str:
        return self._matcher.matched

    def push(self, said: Said) -> Said:
        """Return what may be shown now. After a match: what comes before it, and nothing more."""
        return Said(said.thoughts, [part for part in self._shown(said.parts) if part])

    def flush(self) -> Said:
        """The output has ended: return the withheld rest."""
        return Said(parts=[rest] if (rest := self._matcher.flush()) else [])

    def _shown(self, parts: Iterable[str | CallDelta]) -> Iterable[str | CallDelta]:
        for part in parts:
            if isinstance(part, str):
                yield self._matcher.push(part)
            else:
                yield self._matcher.flush()
                yield part
            if self._matcher.matched:
                return
