"""Tool calls in DeepSeek V3.2's markup.

    text

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

The empty line before the calls is part of their mark: the template writes it again. A parameter is the text itself
(string="true") or JSON. They become one JSON object, whose beginning is known when a parameter's text comes or its JSON
is whole. A call has exactly these attributes, in any order and quotes, each parameter once, and white space between
its tags; without its end mark it is none, because a parameter may be missing.
"""

import enum
import json
import re

from millrace_router.text.call_arguments import NONE, may_become_object, read_json
from millrace_router.text.call_stream import CallReader, ListMarks, Offer
from millrace_router.text.markers import DSML, Scanner

CALLS, CALLS_END = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
GAP = "\n\n"  # before CALLS
CALL, CALL_END = f"<{DSML}invoke", f"</{DSML}invoke>"
PARAMETER, PARAMETER_END = f"<{DSML}parameter", f"</{DSML}parameter>"
MARKS = ListMarks((GAP + CALLS, CALLS), CALL, CALL_END, CALLS_END)
_ATTRIBUTE = re.compile(r"""\s+(\w+)=(?:"([^"\n｜]*)"|'([^'\n｜]*)')""")
_TAG = re.compile(rf"(?:{_ATTRIBUTE.pattern})*\s*>")
_BEGUN = re.compile(rf"""(?:{_ATTRIBUTE.pattern})*(?:\s*|\s+\w+(?:=(?:"[^"\n｜]*|'[^'\n｜]*)?)?)""")


class _DsmlState(enum.Enum):
    HEAD = enum.auto()
    PARAMETERS = enum.auto()  # between them
    TAG = enum.auto()  # attributes of a parameter
    STRING = enum.auto()
    JSON = enum.auto()


class DsmlCall(CallReader):
    def __init__(self, offer: Offer) -> None:
        super().__init__()
        self._offer = offer
        self._state = _DsmlState.HEAD
        self._scanner = Scanner()
        self._seen: set[str] = set()  # names of parameters
        self._member = ""  # the beginning of a JSON parameter in the object
        self._raw: list[str] = []  # what was taken of a parameter that has no pieces yet
        self._value: list[str] = []  # of a JSON parameter

    def push(self, text: str) -> None:
        self._scanner.text += text
        while not self.broken and self._step():
            pass

    def close(self, marked: bool) -> bool:
        whole = marked and not self.broken and self._state is _DsmlState.PARAMETERS and not self._scanner.text.strip()
        if whole:
            self.pieces.append("}" if self._seen else NONE)
        return whole

    def cut(self) -> bool:
        if self._state is _DsmlState.JSON:
            value = "".join(self._value).lstrip()
            if not may_become_object('{"": ' + value):
                return False
            self.pieces.append(self._member + value)
        return bool(self.name)

    def unread(self) -> str:
        return "".join(self._raw) + self._scanner.text

    def _step(self) -> bool:
        """Read a piece. False: more text is needed, or nothing helps."""
        match self._state:
            case _DsmlState.HEAD:
                return self._read_head()
            case _DsmlState.PARAMETERS:
                text = self._scanner.text.lstrip()
                if text.startswith(PARAMETER):
                    self._raw = [PARAMETER]
                    self._scanner.text = text[len(PARAMETER) :]
                    return self._go(_DsmlState.TAG)
                return self._break(not PARAMETER.startswith(text))
            case _DsmlState.TAG:
                return self._read_tag()
            case _:
                return self._read_value()

    def _go(self, state: _DsmlState) -> bool:
        self._state = state
        return True

    def _break(self, broken: bool) -> bool:
        self.broken = broken
        return False

    def _attributes(self) -> dict[str, str] | None:
        """Take the rest of a tag; None: it is not whole. Attributes of which one is there twice are none."""
        tag = _TAG.match(self._scanner.text)
        if tag is None:
            self.broken = _BEGUN.fullmatch(self._scanner.text) is None
            return None
        self._raw.append(self._scanner.take(tag.end()))
        found = [(at[1], at[2] if at[3] is None else at[3]) for at in _ATTRIBUTE.finditer(tag[0])]
        return dict(found) if len(dict(found)) == len(found) else {}

    def _read_head(self) -> bool:
        if (attributes := self._attributes()) is None:
            return False
        name = attributes.get("name", "")
        if attributes.keys() != {"name"} or name not in self._offer.names:
            return self._break(True)
        self.name = name
        return self._go(_DsmlState.PARAMETERS)

    def _read_tag(self) -> bool:
        if (attributes := self._attributes()) is None:
            return False
        state = {"true": _DsmlState.STRING, "false": _DsmlState.JSON}.get(attributes.get("string", ""))
        if attributes.keys() != {"name", "string"} or state is None or attributes["name"] in self._seen:
            return self._break(True)
        self._member = f"{', ' if self._seen else '{'}{_quoted(attributes['name'])}: "
        self._seen.add(attributes["name"])
        if state is _DsmlState.STRING:
            self._told(f'{self._member}"')
        return self._go(state)

    def _read_value(self) -> bool:
        before, found = self._scanner.until(PARAMETER_END, PARAMETER)
        if self._state is _DsmlState.STRING:
            self._told(_quoted(before)[1:-1])
        else:
            self._raw.append(before)
            self._value.append(before)
        if found == PARAMETER_END and self._state is _DsmlState.STRING:
            self._told('"')
            return self._go(_DsmlState.PARAMETERS)
        self._raw.append(found)
        return self._read_json() if found == PARAMETER_END else self._break(bool(found))

    def _read_json(self) -> bool:
        text = "".join(self._value).strip()
        self._value.clear()
        valid, _ = read_json(text)
        if not valid:
            return self._break(True)
        self._told(self._member + text)
        return self._go(_DsmlState.PARAMETERS)

    def _told(self, piece: str) -> None:
        self.pieces.append(piece)
        self._raw.clear()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
