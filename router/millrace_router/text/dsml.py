"""Separation of tool calls in DeepSeek V3.2's markup from the text of the stream.

    text

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

The empty line before the calls is part of their mark: the template writes it again. A parameter is the text itself
(string="true") or JSON. They become one JSON object, told while it comes.
"""

from __future__ import annotations

import json
import re

from millrace_router.text.call_stream import CallParser, State
from millrace_router.text.markers import DSML

CALLS, CALLS_END = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
GAP = "\n\n"  # before CALLS
CALL, CALL_END = f"<{DSML}invoke", f"</{DSML}invoke>"
PARAMETER, PARAMETER_END = f"<{DSML}parameter", f"</{DSML}parameter>"
_NAME, _STRING = re.compile(r'\sname="([^"]*)"'), re.compile(r'\sstring="true"')


class DsmlParser(CallParser):
    def __init__(self) -> None:
        super().__init__((GAP + CALLS, CALLS), CALL, CALLS_END)
        self._next = "{"  # stands before the next parameter
        self._late = ""  # text inside a call: shown behind it, because it would part the arguments

    def _read_call(self) -> bool:
        match self._state:
            case State.PARAMETERS:
                before, found = self._scanner.until(PARAMETER, CALL_END)
                self._between(before, closed=bool(found))
                self._late += self._text.pop()
                if found == CALL_END:
                    self._add("{}" if self._next == "{" else "}")
                    self._show_late()
                return self._go({PARAMETER: State.NAME, CALL_END: State.BETWEEN}.get(found))
            case State.NAME:
                return self._read_name()
            case _:
                before, found = self._scanner.until(PARAMETER_END)
                self._tell(before)
                if found and self._state is State.STRING:
                    self._add('"')
                return self._go({PARAMETER_END: State.PARAMETERS}.get(found))

    def _show_late(self) -> None:
        self._text.append(self._late)
        self._late = ""

    def _end_call(self, rest: str) -> None:
        self._show_late()
        match self._state:
            case State.PARAMETERS:
                self._between(rest, closed=True)
            case State.NAME:
                self._text.append(PARAMETER + rest)
            case _:
                self._tell(rest)

    def _attributes(self) -> str | None:
        """Take the rest of a tag; None: more text is needed."""
        attributes, end, _ = self._scanner.text.partition(">")
        if not end:
            return None
        self._scanner.take(len(attributes) + 1)
        return attributes

    def _read_head(self) -> bool:
        if (attributes := self._attributes()) is None:
            return False
        if not (name := _NAME.search(attributes)):
            self._text.append(f"{CALL}{attributes}>")
            return self._go(State.BETWEEN)
        self._begin(name[1])
        self._next = "{"
        return self._go(State.PARAMETERS)

    def _read_name(self) -> bool:
        if (attributes := self._attributes()) is None:
            return False
        if not (name := _NAME.search(attributes)):
            self._late += f"{PARAMETER}{attributes}>"
            return self._go(State.PARAMETERS)
        string = bool(_STRING.search(attributes))
        self._add(f"{self._next}{_quoted(name[1])}: " + ('"' if string else ""))
        self._next = ", "
        return self._go(State.STRING if string else State.JSON)

    def _tell(self, text: str) -> None:
        self._add(_quoted(text)[1:-1] if self._state is State.STRING else text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
