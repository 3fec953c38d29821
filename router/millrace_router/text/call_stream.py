"""What parsers of tool calls have in common: a text goes in by pieces, and text and parts of calls come out in their
order.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from millrace_router.text.markers import Scanner


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The new part of call `index`. `name` is set on its first delta, and `id` when the model itself gave the call an
    id, by which the prompt must name it later; `arguments` is a piece of JSON text.
    """

    index: int
    name: str
    arguments: str
    id: str = ""


class State(enum.Enum):
    TEXT = enum.auto()
    BETWEEN = enum.auto()  # calls
    HEAD = enum.auto()  # what stands before a call's arguments
    ARGUMENTS = enum.auto()  # in one piece
    PARAMETERS = enum.auto()  # or one by one: between them
    NAME = enum.auto()  # attributes of a parameter
    STRING = enum.auto()
    JSON = enum.auto()


class CallParser(ABC):
    """Every `push` and the final `flush` give the new text and calls. What comes out does not depend on how the text
    was cut into pieces. Nothing but the marks of well-formed calls is left out: what cannot be read as a call is text.
    """

    def __init__(self, opens: tuple[str, ...], call: str, closes: str) -> None:
        """The marks that begin a list of calls, begin a call, and end the list."""
        self._opens, self._call, self._closes = opens, call, closes
        self._state = State.TEXT
        self._scanner = Scanner()
        self._space = ""  # between calls: belongs to the text if more than white space comes
        self._index = -1
        self._text: list[str] = []  # behind `_parts`
        self._parts: list[str | CallDelta] = []

    @property
    def called(self) -> bool:
        """A call has ended."""
        return self._index > 0 or (self._index == 0 and self._state in (State.TEXT, State.BETWEEN, State.HEAD))

    def push(self, text: str) -> list[str | CallDelta]:
        self._scanner.text += text
        while self._step():
            pass
        return self._taken()

    def flush(self) -> list[str | CallDelta]:
        """The text has ended. Arguments that end here end as if their call had been closed."""
        rest = self._scanner.rest()
        match self._state:
            case State.TEXT:
                self._text.append(rest)
            case State.BETWEEN:
                self._between(rest, closed=True)
            case State.HEAD:
                self._text.append(self._call + rest)
            case _:
                self._end_call(rest)
        return self._taken()

    def _step(self) -> bool:
        """Parse a piece of the text. False: more text is needed."""
        match self._state:
            case State.TEXT:
                before, found = self._scanner.until(*self._opens)
                self._text.append(before)
                return self._go(State.BETWEEN if found else None)
            case State.BETWEEN:
                before, found = self._scanner.until(self._call, self._closes)
                self._between(before, closed=bool(found))
                return self._go({self._call: State.HEAD, self._closes: State.TEXT}.get(found))
            case State.HEAD:
                return self._read_head()
            case _:
                return self._read_call()

    def _go(self, state: State | None) -> bool:
        self._state = state or self._state
        return state is not None

    @abstractmethod
    def _read_head(self) -> bool:
        """As `_step`, behind the mark of a call."""

    @abstractmethod
    def _read_call(self) -> bool:
        """As `_step`, behind the head of a call."""

    @abstractmethod
    def _end_call(self, rest: str) -> None:
        """The text has ended inside a call with `rest`, in which no mark is whole."""

    def _taken(self) -> list[str | CallDelta]:
        self._place_text()
        parts, self._parts = self._parts, []
        return parts

    def _place_text(self) -> None:
        if text := "".join(self._text):
            self._parts.append(text)
        self._text.clear()

    def _between(self, text: str, *, closed: bool) -> None:
        """`text` stands between calls, and `closed`: ends there. White space between two marks separates calls."""
        text = self._space + text
        kept = text.rstrip()
        self._text.append(kept)
        self._space = "" if closed else text[len(kept) :]

    def _begin(self, name: str, call_id: str = "") -> None:
        self._index += 1
        self._place_text()
        self._parts.append(CallDelta(self._index, name, "", call_id))

    def _add(self, arguments: str) -> None:
        if not arguments:
            return
        self._place_text()
        last = self._parts[-1] if self._parts else None
        if isinstance(last, CallDelta) and last.index == self._index:
            self._parts[-1] = replace(last, arguments=last.arguments + arguments)
        else:
            self._parts.append(CallDelta(self._index, "", arguments))
