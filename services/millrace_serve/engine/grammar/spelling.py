"""Tokens that would spell a mark of the chat format out of ordinary text.

Where tool calls are read, `<|tool_call_end|>` ends a call, whether one special token wrote it or a string of JSON has
it by letters. A grammar knows the special token from text; the readers of the text do not.
"""

from __future__ import annotations

from collections.abc import Sequence


class Spelling:
    def __init__(self, texts: Sequence[bytes]) -> None:
        """`texts` of the vocabulary, by token id; empty: no text."""
        self._texts = texts
        self._completing: dict[tuple[bytes, int], frozenset[int]] = {}

    def completing(self, tokens: Sequence[int], marks: Sequence[bytes]) -> frozenset[int]:
        """The tokens after which a mark is whole in the text of `tokens`, in which none was."""
        if not marks:
            return frozenset()
        tail = self._tail(tokens, max(map(len, marks)) - 1)
        found: frozenset[int] = frozenset()
        for mark in marks:
            for size in range(min(len(tail), len(mark) - 1), -1, -1):
                if tail.endswith(mark[:size]):
                    found |= self._of(mark, size)
        return found

    def _tail(self, tokens: Sequence[int], size: int) -> bytes:
        """The last bytes of the text behind the newest token that is no text."""
        tail = b""
        for token in reversed(tokens):
            if len(tail) >= size or not (text := self._texts[token]):
                break
            tail = text + tail
        return tail[-size:] if size else b""

    def _of(self, mark: bytes, size: int) -> frozenset[int]:
        """The tokens that complete `mark` behind its first `size` bytes."""
        if (mark, size) not in self._completing:
            rest = mark[size:]
            self._completing[mark, size] = frozenset(
                token
                for token, text in enumerate(self._texts)
                if text and (text.startswith(rest) if size else mark in text)
            )
        return self._completing[mark, size]
