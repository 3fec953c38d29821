"""Separation of tool calls between special tokens from the text of the stream.

    V3, R1   text CALLS ( CALL function SEP name \\n ```json \\n arguments \\n ``` CALL_END )+ CALLS_END
    V3.1     text CALLS ( CALL name SEP arguments CALL_END )+ CALLS_END
    Kimi K2  text CALLS ( CALL functions.name:number SEP arguments CALL_END )+ CALLS_END

(The words in capitals are the special tokens of markers.py.) One parser reads all: V3's kind is always "function", and
what follows it there is a name, never "{". Kimi K2 numbers the calls of a conversation, and its template wants the
whole head back as the id of the call.
"""

from __future__ import annotations

import re

from millrace_router.text.call_stream import CallParser, State
from millrace_router.text.markers import DEEPSEEK, CallMarkers

KIND, FENCE = "function", "```"
# The lines of a V3 head behind SEP: the name, then the fence, or arguments where the model left the code block out.
_V3_LINES = re.compile(r"\s*(\S[^\n]*)\n\s*(?:```[^\n]*\n|(?=\S[^\n]*\n))")
_KIMI_HEAD = re.compile(r"functions\.(.+):\d+")


class MarkedCallParser(CallParser):
    def __init__(self, markers: CallMarkers = DEEPSEEK) -> None:
        super().__init__((markers.calls,), markers.call, markers.calls_end)
        self._marks = markers
        self._tail = ""  # text that belongs to the arguments if more of them come
        self._begun = False  # the arguments

    def _read_call(self) -> bool:
        before, found = self._scanner.until(self._marks.call_end)
        self._tell(before)
        return self._go(State.BETWEEN if found else None)

    def _end_call(self, rest: str) -> None:
        self._tell(rest)

    def _read_head(self) -> bool:
        """Take a whole head, or all of a call without one, which is text."""
        call, end, _ = self._scanner.text.partition(self._marks.call_end)
        kind, separator, rest = call.partition(self._marks.sep)
        name, call_id, size = kind.strip() if separator else "", "", len(kind) + len(separator)
        if name == KIND and not rest.lstrip().startswith("{"):  # else a function of V3.1 that has this name
            lines = _V3_LINES.match(rest)
            name, size = (lines[1].strip(), size + lines.end()) if lines else ("", size)
        elif numbered := _KIMI_HEAD.fullmatch(name):
            name, call_id = numbered[1], name
        if name:
            self._scanner.take(size)
            self._begun, self._tail = False, ""
            self._begin(name, call_id)
            return self._go(State.ARGUMENTS)
        if kind.strip() or not separator:
            if not end:
                return False
            size = len(call) + len(end)
        self._text.append(self._call + self._scanner.take(size))
        return self._go(State.BETWEEN)

    def _tell(self, text: str) -> None:
        """Emit arguments, without the white space before them and the text after them."""
        text = self._tail + text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        end = _tail(text)
        self._tail = text[end:]
        self._add(text[:end])


def _tail(text: str) -> int:
    """Start of the longest tail that may be the end of V3's code block: white space, ``` or less, white space."""
    end = len(text.rstrip())
    ticks = next((n for n in range(min(3, end)) if text[end - n - 1] != "`"), min(3, end))
    return len(text[: end - ticks].rstrip())
