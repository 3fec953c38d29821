"""Separation of tool calls in DeepSeek's formats from the text of the stream.

    V3, R1   text CALLS ( CALL function SEP name \\n ```json \\n arguments \\n ``` CALL_END )+ CALLS_END
    V3.1     text CALLS ( CALL name SEP arguments CALL_END )+ CALLS_END

(The words in capitals are the special tokens of markers.py.) One parser reads both: V3's kind is always "function",
and what follows it there is a name, never "{".
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from millrace_router.text.markers import CALL, CALL_END, CALL_SEP, CALLS, CALLS_END, Scanner

KIND, FENCE = "function", "```"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The new part of call `index`. `name` is set on its first delta; `arguments` is a piece of JSON text."""

    index: int
    name: str
    arguments: str


class _State(enum.Enum):
    TEXT = enum.auto()
    BETWEEN = enum.auto()  # calls
    HEAD = enum.auto()  # what stands before a call's arguments
    ARGUMENTS = enum.auto()


# The lines of a V3 head behind SEP: the name, then the fence, or arguments where the model left the code block out.
_V3_LINES = re.compile(r"\s*(\S[^\n]*)\n\s*(?:```[^\n]*\n|(?=\S[^\n]*\n))")


class ToolCallParser:
    """Every `push` and the final `flush` give the new text and calls. What comes out does not depend on how the text
    was cut into pieces. A call that is cut off before its arguments begin is left out.
    """

    def __init__(self) -> None:
        self._state = _State.TEXT
        self._scanner = Scanner()
        self._tail = ""  # text that belongs to the arguments if more of them come
        self._begun = False  # the arguments
        self._index = -1
        self._text: list[str] = []
        self._calls: list[CallDelta] = []

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        self._scanner.text += text
        while self._step():
            pass
        return self._taken()

    def flush(self) -> tuple[str, list[CallDelta]]:
        """The text has ended. Arguments that end here end as if their call had been closed."""
        rest = self._scanner.rest()
        if self._state is _State.TEXT:
            self._text.append(rest)
        elif self._state is _State.ARGUMENTS:
            self._tell(rest)
        return self._taken()

    def _taken(self) -> tuple[str, list[CallDelta]]:
        text, calls = "".join(self._text), self._calls
        self._text, self._calls = [], []
        return text, calls

    def _step(self) -> bool:
        """Parse a piece of the text. False: more text is needed."""
        match self._state:
            case _State.TEXT:
                before, marker = self._scanner.until(CALLS)
                self._text.append(before)
                return self._go(_State.BETWEEN if marker else None)
            case _State.BETWEEN:
                _, marker = self._scanner.until(CALL, CALLS_END)
                return self._go({CALL: _State.HEAD, CALLS_END: _State.TEXT}.get(marker))
            case _State.HEAD:
                return self._read_head()
            case _State.ARGUMENTS:
                before, marker = self._scanner.until(CALL_END)
                self._tell(before)
                return self._go(_State.BETWEEN if marker else None)

    def _go(self, state: _State | None) -> bool:
        self._state = state or self._state
        return state is not None

    def _read_head(self) -> bool:
        """Take a whole head, or all of a call without one."""
        call, end, _ = self._scanner.text.partition(CALL_END)
        kind, separator, rest = call.partition(CALL_SEP)
        name, size = kind.strip() if separator else "", len(kind) + len(separator)
        if name == KIND and not rest.lstrip().startswith("{"):  # else a function of V3.1 that has this name
            lines = _V3_LINES.match(rest)
            name, size = (lines[1].strip(), size + lines.end()) if lines else ("", size)
        if not name and (kind.strip() or not separator):
            if not end:
                return False
            size = len(call) + len(end)
        self._scanner.take(size)
        return self._begin(name) if name else self._go(_State.BETWEEN)

    def _begin(self, name: str) -> bool:
        """The arguments of a call are next."""
        self._index += 1
        self._begun, self._tail = False, ""
        self._calls.append(CallDelta(self._index, name, ""))
        return self._go(_State.ARGUMENTS)

    def _tell(self, text: str) -> None:
        """Emit arguments, without the white space before them and the text after them."""
        text = self._tail + text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        end = _tail(text)
        self._tail = text[end:]
        if end:
            self._add(text[:end])

    def _add(self, arguments: str) -> None:
        last = self._calls[-1] if self._calls else None
        if last is not None and last.index == self._index:
            self._calls[-1] = CallDelta(last.index, last.name, last.arguments + arguments)
        else:
            self._calls.append(CallDelta(self._index, "", arguments))


def _tail(text: str) -> int:
    """Start of the longest tail that may be the end of V3's code block: white space, ``` or less, white space."""
    end = len(text.rstrip())
    ticks = next((n for n in range(min(3, end)) if text[end - n - 1] != "`"), min(3, end))
    return len(text[: end - ticks].rstrip())
