"""What a client writes is text, also where it is spelled like a special token: no client can end its own turn.

A chat template makes one text of its own tokens and of what clients sent. So what looks like a token in the latter gets
GUARD in front before. The template sees the rest unchanged: one that drops all before `</think>` still does so.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

from millrace_common.json_values import Json
from tokenizers import AddedToken, Encoding, models
from tokenizers import Tokenizer as HfTokenizer

Source = Literal["chats", "prompts"]
BY_DEFAULT: tuple[Source, ...] = ("prompts",)
GUARD = "\udfff"  # no client can send it: a lone surrogate has no UTF-8
SLICE = 1 << 16  # characters of one search: no other thread runs during it, which takes some ms
_GUARDED = re.compile(f"{GUARD}[^{GUARD}]?")


class ClientText:
    def __init__(self, tokenizer: HfTokenizer, special_tokens_in: Collection[Source]) -> None:
        """`special_tokens_in`: the texts in which clients may write special tokens."""
        self._special_tokens_in = special_tokens_in
        added = tokenizer.get_added_tokens_decoder()
        marks = [token.content for token in added.values() if _is_mark(token)]
        self._firsts, self._longest = {mark[0] for mark in marks}, max(map(len, marks), default=0)
        self._whole, self._begun = (re.compile(f"(?={_regex(marks, end)})") for end in ("", r"|\s*\Z"))
        self._plain = HfTokenizer(tokenizer.model)  # the same vocabulary without added tokens
        self._finder = HfTokenizer(models.WordLevel({"": 0}, ""))  # added tokens, and one token for all between two
        self._finder.add_tokens(list(added.values()))
        self._added = {self._finder.token_to_id(token.content): id for id, token in added.items()}
        self._plain.normalizer = self._finder.normalizer = tokenizer.normalizer
        self._plain.pre_tokenizer = tokenizer.pre_tokenizer

    def guarded(self, value: Json, source: Source) -> Json:
        """A JSON value with GUARD before each mark in its texts, and before an end that the next text may complete."""
        return value if source in self._special_tokens_in else self._guarded(value)

    def encode(self, text: str, most: float) -> tuple[list[int], int]:
        """The token ids of a text with GUARD, not all of them if there are more than `most`, and their number. The text
        between two tokens is encoded by itself, as the library does.
        """
        ids, count, at = list[int](), 0, 0
        for token, (begin, end) in self._found(_GUARDED.sub(lambda match: "\0" * len(match[0]), text)):
            between, more = self._between(text[at:begin], most - count)
            ids += [*between, token]
            count, at = count + more + 1, end
        rest, more = self._between(text[at:], most - count)
        return ids + rest, count + more

    def _found(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """The added tokens and their places. Unlike `encode`, a batch lets other threads run."""
        (seen,) = self._finder.encode_batch([text], add_special_tokens=False)
        found = zip(seen.ids, seen.offsets, strict=True)
        return [(self._added[token], place) for token, place in found if token in self._added]

    def _guarded(self, value: Json) -> Json:
        if isinstance(value, str):
            for first in self._firsts:  # most texts have none of them, which takes no time to find out
                if first in value:
                    places = (0, *self._marks(value), len(value))
                    return GUARD.join(value[begin:end] for begin, end in itertools.pairwise(places))
            return value
        if isinstance(value, dict):
            return {self._guarded(name): self._guarded(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(item) for item in value]
        return value

    def _marks(self, text: str) -> Iterator[int]:
        """The places at which a mark begins, or at the end may begin."""
        tail = max(len(text.rstrip()) - self._longest, 0)  # before it no mark can go on behind the text
        for start in range(0, tail, SLICE):
            end = min(start + SLICE, tail)
            found = (match.start() for match in self._whole.finditer(text, start, end + self._longest))
            yield from (place for place in found if place < end)
        yield from (match.start() for match in self._begun.finditer(text, tail))

    def _between(self, text: str, most: float) -> tuple[list[int], int]:
        text = text.replace(GUARD, "")
        return ids_within(self._plain.encode_batch_fast([text], add_special_tokens=False)[0], most) if text else ([], 0)


def ids_within(encoding: Encoding, most: float) -> tuple[list[int], int]:
    """The ids, none if there are more than `most`, and their number: no other thread runs while the list is made."""
    return (encoding.ids if len(encoding) <= most else []), len(encoding)


def _is_mark(token: AddedToken) -> bool:
    """Others are words that a tokenizer learned late, such as the letter ü of DeepSeek's first ones."""
    word = token.content.strip()
    return token.special or (len(word) > 1 and not word.isalnum())


def _regex(texts: Iterable[str], end: str, here: str = "") -> str:
    """A regex of the texts. `end`: what else may follow a part of one; `here`: what else may be there."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        if not text:
            return ""
        rests.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(first) + _regex(rest, end, end) for first, rest in rests.items()]
    return f"(?:{'|'.join(branches)}{here})" if branches else "(?!)"
