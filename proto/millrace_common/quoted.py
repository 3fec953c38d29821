"""Text of others inside of ours: in the log, in errors."""

import re

QUOTED = 100  # characters of a client's text in an error
_UNUSUAL = re.compile(r"[^ -~]")  # characters: some of them can be printed


def cut(text: object, most: int = QUOTED) -> str:
    """The text, or its beginning with how long it is."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[:most]}... ({len(whole)} characters)"


def printable(text: str) -> str:
    """With escapes, such as \\n and \\u2028, for what cannot be printed or looks like a space."""
    return _UNUSUAL.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0] if match[0].isprintable() else match[0].encode("unicode_escape").decode()
