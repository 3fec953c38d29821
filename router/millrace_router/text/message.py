"""What a model says, apart into reasoning, content and tool calls."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from millrace_router.text.call_stream import CallDelta, CallParser, Offer
from millrace_router.text.chat_format import ChatFormat
from millrace_router.text.markers import StopMatcher
from millrace_router.text.reasoning import ReasoningParser

Part = str | CallDelta  # of what follows the reasoning


@dataclass(slots=True)
class ParsedOutput:
    """New reasoning, content and parts of calls. Without calls it costs little: that is nearly every token."""

    reasoning: str = ""
    text: str = ""  # the content; a plain text is nothing else
    calls: Sequence[CallDelta] = ()
    order: Sequence[Part] = ()  # of text and calls, if there are calls

    @classmethod
    def of(cls, reasoning: str, parts: Sequence[Part]) -> "ParsedOutput":
        text = "".join([part for part in parts if isinstance(part, str)])
        calls = [part for part in parts if isinstance(part, CallDelta)]
        return cls(reasoning, text, calls, parts) if calls else cls(reasoning, text)

    @property
    def parts(self) -> Sequence[Part]:
        return self.order or (self.text,)


def joined(parsed: Sequence[ParsedOutput]) -> ParsedOutput:
    """One after the other, with one part for each text and each call."""
    if len(parsed) == 1:
        return parsed[0]
    reasoning = "".join([one.reasoning for one in parsed])
    parts = [part for one in parsed for part in one.parts if part]
    runs = itertools.groupby(parts, lambda part: part.index if isinstance(part, CallDelta) else None)
    return ParsedOutput.of(reasoning, [_one(list(run)) for _, run in runs])


def _one(run: Sequence[Part]) -> Part:
    """Texts, or the parts of one call."""
    text = "".join([part if isinstance(part, str) else part.arguments for part in run])
    return text if isinstance(run[0], str) else replace(run[0], arguments=text)


class MessageParser:
    """Text deltas to parts of a message, whatever the cuts: reasoning first, then tool calls in the rest."""

    def __init__(self, form: ChatFormat, *, thinking: bool, offer: Offer | None) -> None:
        """The prompt has begun the reasoning; the model may call what is offered."""
        self._reasoning = ReasoningParser(thinking, form.ends_reasoning) if form.reasons else None
        self._tools: CallParser | None = form.style.parser(offer) if offer and form.style else None

    @classmethod
    def of_plain_text(cls) -> "MessageParser":
        """All of it is content."""
        return cls(ChatFormat(), thinking=False, offer=None)

    @property
    def called(self) -> bool:
        """A call has ended."""
        return self._tools is not None and self._tools.called

    def push(self, text: str, last: bool, cut: bool = False) -> ParsedOutput:
        """`last`: the output ends here, `cut`: by its length."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
            if last:
                more, rest = self._reasoning.flush()
                reasoning, text = reasoning + more, text + rest
        if self._tools is None:
            return ParsedOutput(reasoning, text)
        return ParsedOutput.of(reasoning, self._tools.push(text, last, cut))


class ContentStop:
    """Stop strings of the content. Reasoning and calls have none, and split the texts around them."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._matcher = StopMatcher(stops)

    @property
    def matched(self) -> str:
        return self._matcher.matched

    def push(self, parsed: ParsedOutput) -> ParsedOutput:
        """Return what may be shown now. After a match: what comes before it, and nothing more."""
        if not parsed.calls:
            return ParsedOutput(parsed.reasoning, self._matcher.push(parsed.text))
        return ParsedOutput.of(parsed.reasoning, [part for part in self._shown(parsed.parts) if part])

    def flush(self) -> ParsedOutput:
        return ParsedOutput(text=self._matcher.flush())

    def _shown(self, parts: Iterable[Part]) -> Iterable[Part]:
        for part in parts:
            if isinstance(part, str):
                yield self._matcher.push(part)
            else:
                yield self._matcher.flush()
                yield part
            if self._matcher.matched:
                return
