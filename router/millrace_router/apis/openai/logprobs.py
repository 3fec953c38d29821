"""Log-probabilities as the OpenAI API has them. A part of a character is written with its bytes as ``\\x..``."""

import codecs
from collections import defaultdict
from collections.abc import Iterable, Sequence

from millrace.v1 import common_pb2

from millrace_router.apis.openai import objects
from millrace_router.text.tokenizer import Tokenizer


class TokenOffsets:
    """Where each token of a text begins, in characters: one that goes on with a character where that begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = 0  # whole characters

    def next(self, data: bytes) -> int:
        """Of the token with these bytes of the text."""
        if not data:
            return self._count
        begun = self._count + len(self._decoder.decode(data[:1]))
        incomplete, _ = self._decoder.getstate()
        self._count = begun + len(self._decoder.decode(data[1:]))
        return begun if incomplete else begun - 1


class Logprobs:
    """Of one answer. `keep_special`: special tokens are part of its text."""

    def __init__(self, tokenizer: Tokenizer, keep_special: bool) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._places: defaultdict[int, TokenOffsets] = defaultdict(TokenOffsets)  # by continuation

    def of_chat(self, entries: Iterable[common_pb2.TokenLogprobs]) -> objects.ChatLogprobs:
        """The bytes of all entries together are the output's."""
        content: list[objects.TokenEntry] = [
            {**self._alternative(entry.sampled), "top_logprobs": [self._alternative(top) for top in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def of_text(self, index: int, entries: Sequence[common_pb2.TokenLogprobs]) -> objects.CompletionLogprobs:
        """The next ones of a continuation. The sampled token is among its alternatives, as the API defines it."""
        place = self._places[index].next
        sampled = [entry.sampled for entry in entries]
        return {
            "tokens": [self._name(token.token_id, "bytes:") for token in sampled],
            "token_logprobs": [token.logprob for token in sampled],
            "top_logprobs": [self._by_name((entry.sampled, *entry.top)) for entry in entries],
            "text_offset": [place(self._bytes(token.token_id)) for token in sampled],
        }

    def _by_name(self, tokens: Iterable[common_pb2.TokenLogprob]) -> dict[str, float]:
        """One entry for each token id: of two with one name the first has it."""
        owners: dict[str, int] = {}
        named: dict[str, float] = {}
        for token in tokens:
            name = self._name(token.token_id, "bytes:")
            if owners.setdefault(name, token.token_id) != token.token_id:
                name = _by_id(token.token_id)
            named[name] = token.logprob
        return named

    def _alternative(self, token: common_pb2.TokenLogprob) -> objects.Alternative:
        data = self._bytes(token.token_id)
        return {"token": self._name(token.token_id), "logprob": token.logprob, "bytes": list(data)}

    def _bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes((token_id,), self._keep_special)

    def _name(self, token_id: int, escaped: str = "") -> str:
        """The token's text; with `escaped` before it, if it has parts of characters."""
        data = self._tokenizer.token_bytes((token_id,))
        try:
            return data.decode() or _by_id(token_id)
        except UnicodeDecodeError:
            return escaped + data.decode("ascii", "backslashreplace")


def _by_id(token_id: int) -> str:
    return f"token_id:{token_id}"
