"""Separation of tool calls from the text of the stream: a text goes in by pieces, and text and calls come out in their
order.

A call comes out when it is certain to be one: its end has been read, its function is one of the request's, and its
arguments are a JSON object. Until then nothing of it is told, so what cannot be read as a call stays text, whole, and
no client gets half of it. Two exceptions:

- A grammar holds the model to its tools (`Offer.certain`): then arguments are told while they come.
- `max_tokens` cuts the output inside a call: its arguments so far are told, the beginning of an object.

A call ends at its end mark. A mark of another call or of the list ends it too, and so does the end of the text; whether
it is whole there depends on the format.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from millrace_router.text.markers import Scanner


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The new part of call `index`. `name` is set on its first delta, and `id` when the format gives calls an id, by
    which the prompt must name it later; `arguments` is a piece of JSON text.
    """

    index: int
    name: str
    arguments: str
    id: str = ""


class Offer(NamedTuple):
    """What a request lets the model call. `ids`: of the conversation's calls. `certain`: only well-formed calls can be
    written, because a grammar is set.
    """

    names: Collection[str]
    ids: Collection[str] = ()
    certain: bool = False


class ListMarks(NamedTuple):
    """Texts that begin a list of calls, begin a call, end it, and end the list."""

    opens: tuple[str, ...]
    call: str
    call_end: str
    closes: str


class CallReader(ABC):
    """One call, read behind its mark. `name` is set when the head is read; then `pieces` of its arguments come.
    `broken`: whatever comes, it is no call.
    """

    def __init__(self) -> None:
        self.name = ""
        self.pieces: list[str] = []
        self.broken = False

    @abstractmethod
    def push(self, text: str) -> None: ...

    @abstractmethod
    def close(self, marked: bool) -> bool:
        """The call has ended, `marked`: by its end mark. Whether it is whole; then the last pieces are there."""

    @abstractmethod
    def cut(self) -> bool:
        """The output is cut here. Whether its head was read and the rest may become arguments, which are then there."""

    @abstractmethod
    def unread(self) -> str:
        """The text behind the pieces."""

    def identify(self) -> str:
        """The id that the format gives the call; empty: none."""
        return ""


class _CallState(enum.Enum):
    TEXT = enum.auto()
    BETWEEN = enum.auto()  # calls
    CALL = enum.auto()


class CallParser:
    """Every `push` gives the new text and calls, at most one delta of each call. What comes out does not depend on how
    the text was cut into pieces. Nothing but the marks of well-formed calls and of their lists is left out.
    """

    def __init__(self, marks: ListMarks, reader: Callable[[], CallReader], offer: Offer) -> None:
        self._marks, self._new_reader, self._certain = marks, reader, offer.certain
        self._state = _CallState.TEXT
        self._scanner = Scanner()
        self._space = ""  # between calls: belongs to the text if more than white space comes
        self._index = -1
        self._text: list[str] = []  # behind `_parts`
        self._parts: list[str | CallDelta] = []
        self._reader = reader()
        self._raw: list[str] = []  # of the open call
        self._told = False  # a part of it

    @property
    def called(self) -> bool:
        """A call has ended."""
        return self._index > 0 or (self._index == 0 and not (self._state is _CallState.CALL and self._told))

    def push(self, text: str, last: bool = False, cut: bool = False) -> list[str | CallDelta]:
        """`last`: the text ends here, `cut`: by its length, so that a call may be unfinished."""
        self._scanner.text += text
        while self._step():
            pass
        if last:
            self._end(cut)
        elif self._state is _CallState.CALL and self._begun:
            self._tell()
        self._place_text()
        parts, self._parts = self._parts, []
        return parts

    def _end(self, cut: bool) -> None:
        rest = self._scanner.rest()
        match self._state:
            case _CallState.TEXT:
                self._text.append(rest)
            case _CallState.BETWEEN:
                self._between(rest, closed=True)
            case _CallState.CALL if cut and not self._reader.broken and self._reader.cut():
                self._tell()  # without `rest`, the beginning of a mark
            case _CallState.CALL:
                self._read(rest)
                self._close("")

    def _step(self) -> bool:
        """Parse a piece of the text. False: more text is needed."""
        marks = self._marks
        match self._state:
            case _CallState.TEXT:
                before, found = self._scanner.until(*marks.opens)
                self._text.append(before)
            case _CallState.BETWEEN:
                before, found = self._scanner.until(marks.call, marks.closes, *marks.opens)
                self._between(before, closed=bool(found))
            case _CallState.CALL:
                before, found = self._scanner.until(marks.call_end, marks.call, marks.closes, *marks.opens)
                self._read(before)
                if found:
                    self._close(found)
        if found == marks.call:
            self._reader, self._raw, self._told = self._new_reader(), [], False
        if found:
            states = {marks.call: _CallState.CALL, marks.closes: _CallState.TEXT}
            self._state = states.get(found, _CallState.BETWEEN)
        return bool(found)

    def _read(self, text: str) -> None:
        self._raw.append(text)
        self._reader.push(text)

    def _close(self, mark: str) -> None:
        """The open call ends at `mark`."""
        end = mark if mark == self._marks.call_end else ""
        begun = self._begun
        whole = self._reader.close(bool(end))
        if whole or begun:
            self._tell()
        if not whole:
            self._text.append((self._reader.unread() if begun else "".join([self._marks.call, *self._raw])) + end)

    @property
    def _begun(self) -> bool:
        """Whether the open call's pieces are told before its end."""
        return self._certain and bool(self._reader.name)

    def _place_text(self) -> None:
        if text := "".join(self._text):
            self._parts.append(text)
        self._text.clear()

    def _tell(self) -> None:
        self._place_text()
        arguments = "".join(self._reader.pieces)
        self._reader.pieces.clear()
        if not self._told:
            self._index += 1
            self._told = True
            self._parts.append(CallDelta(self._index, self._reader.name, arguments, self._reader.identify()))
        elif arguments:
            self._parts.append(CallDelta(self._index, "", arguments))

    def _between(self, text: str, *, closed: bool) -> None:
        """`text` stands between calls, and `closed`: ends there. White space between two marks separates calls."""
        text = self._space + text
        kept = text.rstrip()
        self._text.append(kept)
        self._space = "" if closed else text[len(kept) :]
