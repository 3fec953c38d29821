"""What a client writes is text, also where it is spelled like a special token: no client can end its own turn.

A chat template makes one text of its own tokens and of what clients sent. So what looks like a token in the latter gets
GUARD in front before. The template sees the rest unchanged: one that drops all before `</think>` still does so.
"""

import re
from collections.abc import Collection, Iterable
from typing import Literal

from millrace_common.json_values import Json
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

Source = Literal["chats", "prompts"]
BY_DEFAULT: tuple[Source, ...] = ("prompts",)
GUARD = "\udfff"  # no client can send it: a lone surrogate has no UTF-8
_GUARDED = re.compile(f"{GUARD}[^{GUARD}]?")


class ClientText:
    def __init__(self, tokenizer: HfTokenizer, special_tokens_in: Collection[Source]) -> None:
        """`special_tokens_in`: the texts in which clients may write special tokens."""
        self._hf, self._special_tokens_in = tokenizer, special_tokens_in
        self._added = tokenizer.get_added_tokens_decoder()
        marks = [token.content for token in self._added.values() if _is_mark(token)]
        begun = _begun(marks)
        self._firsts = {mark[0] for mark in marks}
        self._begun, self._each = re.compile(begun), re.compile(f"(?={begun})")  # the latter is slow
        self._plain = HfTokenizer(tokenizer.model)  # the same vocabulary without added tokens
        self._plain.normalizer, self._plain.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer

    def guarded(self, value: Json, source: Source) -> Json:
        """A JSON value with GUARD before each mark in its texts, and before an end that the next text may complete."""
        return value if source in self._special_tokens_in else self._guarded(value)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text with GUARD. The text between two tokens is encoded by itself, as the library does."""
        seen = self._hf.encode(_GUARDED.sub(lambda match: "\0" * len(match[0]), text), add_special_tokens=False)
        ids, at = [], 0
        for token, (begin, end) in zip(seen.ids, seen.offsets, strict=True):
            if token in self._added:
                ids += [*self._between(text[at:begin]), token]
                at = end
        return ids + self._between(text[at:])

    def _guarded(self, value: Json) -> Json:
        if isinstance(value, str):
            for first in self._firsts:  # most texts have none of them, which takes no time to find out
                if first in value:
                    return self._each.sub(GUARD, value) if self._begun.search(value) else value
            return value
        if isinstance(value, dict):
            return {self._guarded(name): self._guarded(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(item) for item in value]
        return value

    def _between(self, text: str) -> list[int]:
        text = text.replace(GUARD, "")
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids if text else []


def _is_mark(token: AddedToken) -> bool:
    """Others are words that a tokenizer learned late, such as the letter ü of DeepSeek's first ones."""
    word = token.content.strip()
    return token.special or (len(word) > 1 and not word.isalnum())


def _begun(texts: Iterable[str], ended: str = "") -> str:
    """A regex of the texts. `ended`: what else may be there."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        if not text:
            return ""
        rests.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(first) + _begun(rest, r"|\s*\Z") for first, rest in rests.items()]
    return f"(?:{'|'.join(branches)}{ended})" if branches else "(?!)"
