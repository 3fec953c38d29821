"""Texts that structure or end a model's output, found in a stream that may be cut anywhere."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

THINK, THINK_END = "<think>", "</think>"


class CallMarkers(NamedTuple):
    """Special tokens around a list of calls, around each call, and between a call's name and its arguments."""

    calls: str
    calls_end: str
    call: str
    call_end: str
    sep: str


DEEPSEEK = CallMarkers(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
KIMI = CallMarkers(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
DSML = "｜DSML｜"  # a token of its own, in the tags of DeepSeek V3.2's calls
ALL = (THINK, THINK_END, *DEEPSEEK, *KIMI, DSML)


class Prefixes:
    """Tails of a text that may be the beginning of one of `markers`."""

    __slots__ = ("_first", "_longest", "_markers")

    def __init__(self, markers: Iterable[str]) -> None:
        self._markers = tuple(markers)
        self._first = frozenset(marker[0] for marker in self._markers)
        self._longest = max(map(len, self._markers), default=0)

    def undecided(self, text: str) -> int:
        """Start of the longest tail that a marker could continue; len(text) when there is none."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._first and any(marker.startswith(text[at:]) for marker in self._markers):
                return at
        return len(text)


class Scanner:
    """Text that has arrived and is not parsed yet."""

    __slots__ = ("text",)

    def __init__(self) -> None:
        self.text = ""

    def until(self, *markers: str) -> tuple[str, str]:
        """Take the text before the first of `markers`, and the marker; else ("") all text that cannot begin one."""
        found = min(((at, marker) for marker in markers if (at := self.text.find(marker)) >= 0), default=None)
        if found is None:
            return self.take(Prefixes(markers).undecided(self.text)), ""
        at, marker = found
        before = self.take(at)
        self.take(len(marker))
        return before, marker

    def rest(self) -> str:
        """Take everything: the text has ended."""
        return self.take(len(self.text))

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        return taken


class StopMatcher:
    """Cuts a text stream before its first stop string: the one that is complete first; of two that end at the same
    character, the longer. So the result does not depend on how the text was cut into pieces. Text that may be the
    beginning of a stop string is withheld until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self._stops = tuple(stops)
        self._prefixes = Prefixes(stops)
        self._held = ""
        self.matched = ""  # the stop string

    def push(self, text: str) -> str:
        """Return the text that may be shown now. After a match: the text before it, and nothing more."""
        if self.matched:
            return ""
        text = self._held + text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            _, at, self.matched = min(hits)
            self._held = ""
            return text[:at]
        keep = self._prefixes.undecided(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """The text has ended: return the withheld rest."""
        held, self._held = self._held, ""
        return held
