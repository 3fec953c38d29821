"""Tool calls between special tokens.

    V3, R1   text CALLS ( CALL function SEP name \\n ```json \\n arguments \\n ``` CALL_END )+ CALLS_END
    V3.1     text CALLS ( CALL name SEP arguments CALL_END )+ CALLS_END
    Kimi K2  text CALLS ( CALL functions.name:number SEP arguments CALL_END )+ CALLS_END

(The words in capitals are the special tokens of markers.py.) One reader reads all: V3's kind is always "function", and
what follows it there is a name, never "{". A call without its end mark is whole when its arguments are: an object has
one end. Arguments without a code block are taken as those in one, none as {}.

Kimi K2 numbers the calls of a conversation, and its template wants the whole head back as the id of the call. Models
write other heads too (`weather:0`, `functions_weather_0`): they are taken when they can mean one of the request's
functions only. The id is the head as it should be, with the next free number where the head's was used before.
"""

import re
from collections.abc import Collection, Mapping, Sequence

from millrace_common.json_values import Json

from millrace_router.text.call_arguments import NONE, is_object, may_become_object
from millrace_router.text.call_stream import CallReader, Offer
from millrace_router.text.markers import CallMarkers

KIND, FENCE = "function", "```"
# The lines of a V3 head behind SEP: the name, then the fence, or arguments where the model left the code block out.
_V3_LINES = re.compile(r"\s*(\S[^\n]*)\n\s*(?:(```)[^\n]*\n|(?=\S[^\n]*\n))")
_KIMI_HEAD = re.compile(r"functions\.(.+):([0-9]{1,9})")
_PREFIX, _SUFFIX = re.compile(r"functions[._:-]"), re.compile(r"[._:-]([0-9]{1,9})$")  # of other heads


def with_ids(messages: Sequence[Mapping[str, Json]]) -> list[Mapping[str, Json]]:
    """The conversation with ids as Kimi K2 writes them, which other servers' are not: a model writes what it is shown.
    Ids that are so already, and new, stay.
    """
    made: list[Mapping[str, Json]] = []
    now: dict[str, str] = {}  # a call's id: that in the prompt
    taken, number = set[str](), 0  # ids in the prompt, and the least number of the next: it only rises
    for turn in messages:
        calls = []
        for call in turn.get("tool_calls", ()):
            name, call_id = call["function"]["name"], call["id"]
            head = _KIMI_HEAD.fullmatch(call_id)
            if not head or head[1] != name or call_id in taken:
                call_id, number = _free_id(name, max(number, len(taken)), taken)
            taken.add(call_id)
            now[call["id"]] = call_id
            calls.append({**call, "id": call_id})
        named = {"tool_call_id": now.get(turn["tool_call_id"], turn["tool_call_id"])} if "tool_call_id" in turn else {}
        made.append({**turn, **named, **({"tool_calls": calls} if calls else {})})
    return made


def _free_id(name: str, number: int, taken: Collection[str]) -> tuple[str, int]:
    """With its number: the first free one from `number` on."""
    while (call_id := f"functions.{name}:{number}") in taken:
        number += 1
    return call_id, number


class MarkedCall(CallReader):
    def __init__(self, marks: CallMarkers, offer: Offer, ids: set[str] | None) -> None:
        """`ids`: those in use, of a format that has them."""
        super().__init__()
        self._separator, self._names, self._ids = marks.sep, offer.names, ids
        self._number: int | None = None
        self._text = ""  # until the head is read; then what belongs to the arguments if more of them come
        self._fenced = False
        self._arguments: list[str] = []  # all pieces

    def push(self, text: str) -> None:
        self._text += text
        if not self.name and not self.broken:
            self._read_head()
        if self.name:
            self._read_arguments()

    def close(self, marked: bool) -> bool:
        if not self.name and not self.broken:
            self._read_head(ended=True)
            self._read_arguments()
        rest, arguments = self._text.strip(), "".join(self._arguments)
        if not self.name or rest not in ("", FENCE):
            return False
        if not arguments and marked and bool(rest) is self._fenced:
            self.pieces.append(NONE)
            return True
        return is_object(arguments)

    def cut(self) -> bool:
        return bool(self.name) and may_become_object("".join(self._arguments))

    def unread(self) -> str:
        return self._text

    def identify(self) -> str:
        if self._ids is None:
            return ""
        call_id, _ = _free_id(self.name, len(self._ids) if self._number is None else self._number, self._ids)
        self._ids.add(call_id)
        return call_id

    def _read_head(self, ended: bool = False) -> None:
        """`ended`: all of the call is there."""
        kind, separator, rest = self._text.partition(self._separator)
        if not separator:
            return
        head = kind.strip()
        lines = not rest.lstrip().startswith("{") and (rest.strip() or not ended)  # else it is a name, of V3.1
        if head == KIND and self._ids is None and lines:
            self._read_lines(rest, ended)
        else:
            self.name, self._number = self._meant(head)
            self._text, self.broken = rest, not self.name

    def _read_lines(self, rest: str, ended: bool) -> None:
        lines = _V3_LINES.match(rest + "\n" if ended else rest)
        if lines or ended:
            name = (lines[1] if lines else rest).strip()
            self.name = name if name in self._names else ""
            self._fenced = bool(lines and lines[2])
            self._text, self.broken = rest[lines.end() :] if lines else "", not self.name

    def _meant(self, head: str) -> tuple[str, int | None]:
        """The function that a head means, and its number; no name: none, or more than one."""
        if self._ids is None or head in self._names:
            return head if head in self._names else "", None
        if (numbered := _KIMI_HEAD.fullmatch(head)) and numbered[1] in self._names:
            return numbered[1], int(numbered[2])
        bare, suffix = _PREFIX.sub("", head, count=1) if _PREFIX.match(head) else head, _SUFFIX.search(head)
        shorter = {_SUFFIX.sub("", text) for text in (head, bare)}
        found = {name for name in {bare, *shorter} if name in self._names}
        if len(found) != 1:
            return "", None
        (name,) = found
        return name, int(suffix[1]) if suffix and name in shorter else None

    def _read_arguments(self) -> None:
        """Take arguments, without the white space before them and what may be behind them."""
        text = self._text if self._arguments else self._text.lstrip()
        end = self._end(text)
        if end:
            self._arguments.append(text[:end])
            self.pieces.append(text[:end])
        self._text = text[end:]

    def _end(self, text: str) -> int:
        """Start of the longest tail that may end the call: white space, and that of a code block, ``` or less."""
        end = len(text.rstrip())
        if not self._fenced:
            return end
        ticks = next((n for n in range(min(3, end)) if text[end - n - 1] != "`"), min(3, end))
        return len(text[: end - ticks].rstrip())
