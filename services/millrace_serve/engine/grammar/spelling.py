"""Tokens that would spell a mark of the chat format out of ordinary text.

Where tool calls are read, `<|tool_call_end|>` ends a call, whether one special token wrote it or a string of JSON has
it by letters. A grammar knows the special token from text; the readers of the text do not.
"""

from collections.abc import Sequence


class Spelling:
    def __init__(self, texts: Sequence[bytes]) -> None:
        """`texts` of the vocabulary, by token id; empty: no text."""
        self._texts = texts
        self._by_first: dict[int, list[int]] = {}
        for token, text in enumerate(texts):
            if text:
                self._by_first.setdefault(text[0], []).append(token)
        self._whole: dict[bytes, frozenset[int]] = {}
        self._rest: dict[bytes, frozenset[int]] = {}

    def completing(self, tokens: Sequence[int], marks: Sequence[bytes]) -> frozenset[int]:
        """The tokens after which a mark is whole in the text of `tokens`, in which none was."""
        if not marks:
            return frozenset()
        tail = self._tail(tokens, max(map(len, marks)) - 1)
        found: frozenset[int] = frozenset()
        for mark in marks:
            found |= self._with(mark)
            at = tail.find(mark[0])
            while at >= 0:
                if mark.startswith(tail[at:]):
                    found |= self._beginning(mark[len(tail) - at :])
                at = tail.find(mark[0], at + 1)
        return found

    def _tail(self, tokens: Sequence[int], size: int) -> bytes:
        """The last bytes of the text behind the newest token that is no text."""
        tail = b""
        for token in reversed(tokens):
            if len(tail) >= size or not (text := self._texts[token]):
                break
            tail = text + tail
        return tail[-size:] if size else b""

    def _with(self, mark: bytes) -> frozenset[int]:
        """The tokens in which the mark is whole."""
        if mark not in self._whole:
            self._whole[mark] = frozenset(token for token, text in enumerate(self._texts) if mark in text)
        return self._whole[mark]

    def _beginning(self, rest: bytes) -> frozenset[int]:
        """The tokens that begin with the rest of a mark."""
        if rest not in self._rest:
            tokens = self._by_first.get(rest[0], [])
            self._rest[rest] = frozenset(token for token in tokens if self._texts[token].startswith(rest))
        return self._rest[rest]
