"""The size of a JSON text as values, without making them: what it costs to read is known before it is read."""

from typing import NamedTuple

from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

MOST = 1 << 17  # of objects, arrays and strings, keys among them, in a request
FEW = 500  # of all values: they are read at once, the values of longer requests in a thread
SHORT = 1 << 18  # bytes, the same
TINY = 1 << 12  # bytes that are not worth counting


class JsonShape(NamedTuple):
    """Of a text that is JSON; of another one any numbers."""

    texts: int  # strings, keys among them, objects and arrays
    separators: int  # commas: at least the numbers, but one of each array or object

    @property
    def small(self) -> bool:
        return self.texts + self.separators <= FEW

    def check(self, max_context: int) -> None:
        """Raise MESSAGE_TOO_LARGE for more than a prompt may need. Token ids are numbers."""
        for count, most, what in (
            (self.texts, MOST, "objects, arrays and strings"),
            (self.separators, MOST + 2 * max_context, "values"),
        ):
            if count > most:
                raise MillraceError(Reason.MESSAGE_TOO_LARGE, f"the request has more than {most} {what}")


def shape(body: bytes) -> JsonShape:
    """Count in a few passes in C, each of which takes some ms for 8 MiB."""
    plain = body.replace(b"\\\\", b"")  # then every \" is part of a string
    quotes = plain.count(b'"') - plain.count(b'\\"')
    if quotes > 2 * MOST:
        return JsonShape(quotes // 2, 0)
    outside = b"".join(plain.replace(b'\\"', b"").split(b'"')[::2])
    return JsonShape(quotes // 2 + outside.count(b"{") + outside.count(b"["), outside.count(b","))
