"""Grammars compiled with llguidance against the checkpoint's vocabulary.

The vocabulary is read when the first grammar comes. Added tokens are no text: a grammar allows one only where it names
its id, and byte-level BPE can spell every text without them. The ends of the sequence are allowed exactly where the
text is complete.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import llguidance
import numpy as np
from millrace_common.grammar import source
from millrace_common.grammar.checker import Checker
from millrace_common.grammar.source import GrammarError
from millrace_common.tokenizer_file import load_tokenizer, token_bytes
from tokenizers import Tokenizer

from millrace_serve.engine.core import Grammar
from millrace_serve.engine.grammar.spelling import Spelling

ALL = np.int32(-1)  # 32 tokens that are allowed
PROCESSES = 2  # that compile


class LlguidanceCompiler:
    def __init__(self, model: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`vocab_size` is the model's: ids beyond the tokenizer's are never allowed."""
        self._model = model
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._loaded: tuple[llguidance.LLTokenizer, Spelling] | None = None
        self._checker = Checker(PROCESSES)
        self._no_stop = np.full(-(-vocab_size // 32), ALL)
        _forbid(self._no_stop, self._eos)

    def free(self, grammar: Grammar) -> np.ndarray:
        mask = self._no_stop.copy()
        _forbid(mask, [token for token in grammar.forbidden_before if token < self._vocab_size])
        return mask

    def compile(self, grammar: Grammar, given_up: threading.Event) -> Callable[[], "_Matcher"]:
        tokenizer, spelling = self._load()
        made = self._checker.check(grammar.kind, grammar.text, given_up)
        base = llguidance.LLMatcher(tokenizer, source.lark(made), limits=source.LIMITS, log_level=0)
        if base.is_error():
            raise GrammarError(source.clear(base.get_error()))
        words, marks, ends = len(self._no_stop), grammar.marks, frozenset(self._eos)
        first = _Matcher(base.deep_copy(), words, ends, spelling, marks)
        if not first.mask.any():
            raise GrammarError(first.error or "no text satisfies it")
        return lambda: _Matcher(base.deep_copy(), words, ends, spelling, marks)

    def close(self) -> None:
        self._checker.close()

    def _load(self) -> tuple[llguidance.LLTokenizer, Spelling]:
        """The vocabulary; the first caller waits about a second."""
        with self._lock:
            if self._loaded is None:
                texts, special = _texts(self._model, self._vocab_size)
                try:
                    wrapper = llguidance.TokenizerWrapper(_Vocabulary(texts, special, self._eos))
                    tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=self._eos)
                except ValueError as error:
                    raise GrammarError(f"the worker's vocabulary cannot be used: {error}") from error
                self._loaded = tokenizer, Spelling([b"" if i in special else text for i, text in enumerate(texts)])
            return self._loaded


class _Matcher:
    """Its library object never leaves a state of error. So no token is consumed that was not found to be legal."""

    def __init__(
        self, matcher: llguidance.LLMatcher, words: int, ends: frozenset[int], spelling: Spelling, marks: Sequence[str]
    ) -> None:
        self._matcher = matcher
        self._ends = ends
        self._spelling = spelling
        self._marks = [mark.encode() for mark in marks]
        self._tokens: list[int] = []
        self._mask = np.zeros(words, np.int32)
        self._filled = False

    @property
    def error(self) -> str:
        return source.clear(self._matcher.get_error())

    @property
    def mask(self) -> np.ndarray:
        if not self._filled:
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            if self._matcher.is_error():
                self._mask.fill(0)
            else:
                _forbid(self._mask, self._spelling.completing(self._tokens, self._marks))
            self._filled = True
        return self._mask

    def accept(self, token: int) -> bool:
        legal = token not in self._ends and token not in self._spelling.completing(self._tokens, self._marks)
        if not legal or self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._tokens.append(token)
        self._filled = False
        return True

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)
            del self._tokens[len(self._tokens) - count :]
            self._filled = False


class _Vocabulary:
    """What llguidance reads of a tokenizer. It encodes no text: nothing is forced (source.HEAD)."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: Collection[int], eos: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special)
        self.eos_token_id = eos[0]

    def __call__(self, data: bytes) -> list[int]:
        return []


def _forbid(mask: np.ndarray, tokens: Collection[int]) -> None:
    bits = mask.view(np.uint32)
    for token in tokens:
        bits[token // 32] &= ~np.uint32(1 << token % 32)


def _texts(model: Path, vocab_size: int) -> tuple[list[bytes], set[int]]:
    """The bytes of all tokens by id, and the ids that are no text: added tokens and gaps."""
    try:
        tokenizer: Tokenizer = load_tokenizer(model)
    except ValueError as error:
        raise GrammarError(f"the worker's checkpoint has no usable tokenizer: {error}") from error
    texts = token_bytes(tokenizer)[:vocab_size]
    texts += [b""] * (vocab_size - len(texts))
    added = tokenizer.get_added_tokens_decoder()
    return texts, {token for token, text in enumerate(texts) if token in added or not text}
