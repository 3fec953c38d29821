"""Regular expressions of ECMAScript in the syntax of llguidance (Rust's regex crate).

Both read most patterns alike and some differently (`.`, `\\s`, `[a&&b]`, `a{,5}`, `\\A`). So every piece is read here
and written in one unambiguous form. What a grammar cannot hold (look-around, back references, word boundaries) is
refused.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field

MAX_GROUPS = 50  # nested
MAX_COUNT = 100_000  # of a repetition
ANY = r"(?s:.*)"
# Strings of JSON are written without \u: so each has one spelling, and no key can be another one in disguise.
UNWRITABLE = frozenset(map(chr, {*range(0x20), 0x7F} - {0x8, 0x9, 0xA, 0xC, 0xD}))
_UNWRITABLE = r"\x{0}-\x{7}\x{B}\x{E}-\x{1F}\x{7F}"
_CLASSES = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t\n\x{B}\f\r\x{2028}\x{2029}\x{FEFF}\p{Zs}",
}
_CONTROLS = {"t": 0x9, "n": 0xA, "v": 0xB, "f": 0xC, "r": 0xD}
_QUANTIFIER = re.compile(r"([*+?]|\{(\d+)(,(\d*))?\})\??")
_GROUP = re.compile(r"\((\?:|\?P?<[A-Za-z_$][\w$]*>|(?!\?))")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})(?:\\u([0-9A-Fa-f]{4}))?|u\{([0-9A-Fa-f]{1,6})\}")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(=[A-Za-z_]+)?\}")


class PatternError(ValueError):
    """The pattern cannot be used. The message is the end of a sentence."""


def searched(pattern: str) -> str:
    """The expression that whole strings of JSON match in which the pattern matches somewhere, as in a JSON schema."""
    return _Reader(pattern, quoted=True).read(ANY)


def whole(pattern: str) -> str:
    """The expression that the same whole texts match."""
    return _Reader(pattern, quoted=False).read("")


def literal(text: str) -> str:
    """The expression that matches this text alone."""
    return "".join(map(_character, map(ord, text)))


def without(words: Collection[str]) -> str:
    """The expression that whole texts match in which none of `words` occurs.

    All words begin with one character, which occurs in them nowhere else.
    """
    (first,) = {word[0] for word in words}
    assert not any(first in word[1:] for word in words)
    other = _character(ord(first))
    tails = _other_than([word[1:] for word in words], other)
    return f"[^{other}]*(?:{other}{tails})*"


def _other_than(words: list[str], first: str) -> str:
    """Texts without `first` that begin with none of `words`."""
    heads = sorted({word[0] for word in words})
    options = [f"[^{first}{''.join(_character(ord(head)) for head in heads)}][^{first}]*"]
    for head in heads:
        rest = [word[1:] for word in words if word[0] == head]
        if all(rest):
            options.append(_character(ord(head)) + _other_than(rest, first))
    return f"(?:{'|'.join(options)})?"


@dataclass(slots=True)
class _Piece:
    """Of a sequence: text of the expression; or an anchor, ^ or $; or the branches of a group."""

    text: str = ""
    anchor: str = ""
    group: "list[list[_Piece]]" = field(default_factory=list)


class _Reader:
    def __init__(self, pattern: str, quoted: bool) -> None:
        self._pattern = pattern
        self._quoted = quoted
        self._at = 0

    def read(self, outside: str) -> str:
        """`outside`: what may stand before and behind a match."""
        branches = self._branches(0)
        if self._at < len(self._pattern):
            raise PatternError(f"the parenthesis at character {self._at} closes nothing")
        return self._join(branches, outside, outside)

    def _branches(self, depth: int) -> list[list[_Piece]]:
        if depth > MAX_GROUPS:
            raise PatternError(f"it has more than {MAX_GROUPS} nested groups")
        branches: list[list[_Piece]] = [[]]
        while self._at < len(self._pattern) and self._pattern[self._at] != ")":
            if self._pattern[self._at] == "|":
                self._at += 1
                branches.append([])
            else:
                branches[-1].append(self._piece(depth))
        return branches

    def _piece(self, depth: int) -> _Piece:
        begin, character = self._at, self._pattern[self._at]
        if character in "^$":
            self._at += 1
            if _QUANTIFIER.match(self._pattern, self._at):
                raise PatternError(f"{character} at character {begin} cannot be repeated")
            return _Piece(anchor=character)
        piece = self._group(depth) if character == "(" else _Piece(text=self._atom())
        if repeated := _QUANTIFIER.match(self._pattern, self._at):
            self._at = repeated.end()
            text = piece.text or f"(?:{self._join(piece.group, None, None)})"
            return _Piece(text=text + self._quantifier(repeated))
        return piece

    def _group(self, depth: int) -> _Piece:
        begin = self._at
        opened = _GROUP.match(self._pattern, begin)
        if opened is None:
            raise PatternError(f"the group at character {begin} is look-around or has flags, which are not supported")
        self._at = opened.end()
        group = self._branches(depth + 1)
        if self._at >= len(self._pattern):
            raise PatternError(f"the parenthesis at character {begin} is not closed")
        self._at += 1
        return _Piece(group=group)

    def _quantifier(self, found: re.Match[str]) -> str:
        if _QUANTIFIER.match(self._pattern, self._at):
            raise PatternError(f"character {self._at} repeats a repetition")
        if found[2] is None:
            return found[1]
        least, most = int(found[2]), int(found[4] or found[2])
        if max(least, most) > MAX_COUNT:
            raise PatternError(f"{found[1]} repeats more than {MAX_COUNT} times")
        if least > most:
            raise PatternError(f"{found[1]} has its larger number first")
        return found[1]

    def _atom(self) -> str:
        character = self._pattern[self._at]
        if character == "[":
            return self._class()
        self._at += 1
        if character == ".":
            return self._writable(r"[^\n\r\x{2028}\x{2029}]")
        if character == "\\":
            point = self._escape()
            return self._writable(point) if isinstance(point, str) else self._literal(point)
        if character in "*+?" or (character == "{" and _QUANTIFIER.match(self._pattern, self._at - 1)):
            raise PatternError(f"{character} at character {self._at - 1} repeats nothing")
        return self._literal(ord(character))

    def _literal(self, point: int) -> str:
        if self._quoted and chr(point) in UNWRITABLE:
            raise PatternError(f"it has the control character U+{point:04X}, which is not supported in JSON")
        return _character(point)

    def _class(self) -> str:
        begin = self._at
        negated = self._pattern.startswith("^", begin + 1)
        self._at += 1 + negated
        items: list[str] = []
        while not self._pattern.startswith("]", self._at):
            left = self._member(begin)
            if self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at):
                self._at += 1
                right = self._member(begin)
                if isinstance(left, str) or isinstance(right, str) or left > right:
                    raise PatternError(f"the class at character {begin} has a range that ends before it begins")
                items.append(f"{_character(left)}-{_character(right)}")
            else:
                items.append(left if isinstance(left, str) else _character(left))
        self._at += 1
        if not items:
            if negated:
                return self._writable(r"[\x{0}-\x{10FFFF}]")
            raise PatternError(f"the class at character {begin} is empty")
        return self._writable(f"[{'^' * negated}{''.join(items)}]")

    def _writable(self, characters: str) -> str:
        return f"[{characters}&&[^{_UNWRITABLE}]]" if self._quoted else characters

    def _member(self, begin: int) -> int | str:
        """The code point of one character of a class, or a class inside it."""
        if self._at >= len(self._pattern):
            raise PatternError(f"the class at character {begin} is not closed")
        character = self._pattern[self._at]
        self._at += 1
        if character != "\\":
            return ord(character)
        if self._pattern.startswith("b", self._at):
            self._at += 1
            return 0x8
        return self._escape()

    def _escape(self) -> int | str:
        """A code point or a class, behind a backslash."""
        character, begin = self._pattern[self._at : self._at + 1], self._at
        self._at += 1
        if character.lower() in _CLASSES:
            return f"[{'^' * character.isupper()}{_CLASSES[character.lower()]}]"
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character == "0" and not self._pattern[self._at : self._at + 1].isdigit():
            return 0
        if character == "c" and re.match("[A-Za-z]", self._pattern[self._at : self._at + 1]):
            self._at += 1
            return ord(self._pattern[self._at - 1]) % 32
        if found := _PROPERTY.match(self._pattern, begin):
            self._at = found.end()
            return f"\\{found[0]}"
        if found := _HEX.match(self._pattern, begin):
            return self._code(found)
        if character and character.isascii() and not character.isalnum():
            return ord(character)
        raise PatternError(f"\\{character} at character {begin - 1} is not supported")

    def _code(self, found: re.Match[str]) -> int:
        self._at = found.end()
        point = int(next(group for group in found.groups() if group is not None), 16)
        low = int(found[3], 16) if found[3] else 0
        if 0xD800 <= point < 0xDC00 <= low < 0xE000:
            return 0x10000 + ((point - 0xD800) << 10) + low - 0xDC00
        if found[3]:
            self._at = found.end(2)
        if 0xD800 <= point < 0xE000 or point > 0x10FFFF:
            raise PatternError(f"\\{found[0]} is not a character")
        return point

    def _join(self, branches: list[list[_Piece]], before: str | None, behind: str | None) -> str:
        """`before`: what may stand before these branches; None: something else stands there, and no ^ may."""
        return "|".join(self._sequence(branch, before, behind) for branch in branches)

    def _sequence(self, pieces: list[_Piece], before: str | None, behind: str | None) -> str:
        begins, ends = pieces[:1] == [_Piece(anchor="^")], pieces[-1:] == [_Piece(anchor="$")]
        if begins:
            pieces, before = pieces[1:], None if before is None else ""
        if ends:
            pieces, behind = pieces[:-1], None if behind is None else ""
        if (begins and before is None) or (ends and behind is None):
            raise PatternError("^ or $ is not at an end of the whole pattern, which is not supported")
        head, tail = before or "", behind or ""
        texts = []
        for i, piece in enumerate(pieces):
            if piece.anchor:
                raise PatternError(f"{piece.anchor} is not at an end of the whole pattern, which is not supported")
            if piece.group:
                first, last = i == 0 and before is not None, i == len(pieces) - 1 and behind is not None
                inner = self._join(piece.group, before if first else None, behind if last else None)
                head, tail = "" if first else head, "" if last else tail
                texts.append(f"(?:{inner})")
            else:
                texts.append(piece.text)
        return head + "".join(texts) + tail if pieces else (head or tail)


def _character(point: int) -> str:
    """One character of an expression or of a class."""
    if 0xD800 <= point < 0xE000:
        raise PatternError("it has half of a surrogate pair")
    text = chr(point)
    return text if text.isascii() and (text.isalnum() or text == "_") else f"\\x{{{point:X}}}"
