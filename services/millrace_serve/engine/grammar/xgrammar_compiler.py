"""Grammars compiled with xgrammar against the checkpoint's vocabulary.

The vocabulary is read when the first grammar comes. Special tokens have no text, so no grammar allows them; the ends of
the sequence are allowed exactly where the text is complete. JSON is written on one line, with a space behind commas and
colons: with free white space a model may indent until its tokens are used up.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from millrace_common import grammar_text
from millrace_common.tokenizer_file import load_tokenizer

from millrace_serve.engine.core import Grammar, GrammarKind
from millrace_serve.engine.grammar.grammars import GrammarError

if TYPE_CHECKING:
    import xgrammar

ALL = np.int32(-1)  # 32 tokens that are allowed
_WHERE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # time and line of xgrammar's source in front of its messages


class XgrammarCompiler:
    def __init__(self, model: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`vocab_size` is the model's: ids beyond the tokenizer's are never allowed."""
        self._model = model
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._no_stop = np.full(-(-vocab_size // 32), ALL)
        for token in self._eos:
            self._no_stop.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)

    def no_stop(self) -> np.ndarray:
        return self._no_stop

    def compile(self, grammar: Grammar) -> Callable[[], _Matcher]:
        if problem := grammar_text.problem(grammar.kind, grammar.text):
            raise GrammarError(problem)
        try:
            compiled = _compile(self._load(), grammar)
        except (RuntimeError, ValueError) as error:  # xgrammar's own errors are RuntimeErrors
            raise GrammarError(_WHERE.sub("", str(error)).strip() or type(error).__name__) from error
        words = len(self._no_stop)
        if not _Matcher(compiled, words).mask.any():
            raise GrammarError("no text satisfies it")
        return lambda: _Matcher(compiled, words)

    def _load(self) -> xgrammar.GrammarCompiler:
        """The library with this vocabulary; the first caller waits about a second."""
        with self._lock:
            if self._compiler is None:
                try:
                    import xgrammar
                except ImportError as error:
                    raise GrammarError("this worker has no xgrammar, which grammars need") from error
                vocabulary = xgrammar.TokenizerInfo(
                    _texts(self._model, self._vocab_size),
                    xgrammar.VocabType.BYTE_LEVEL,
                    vocab_size=self._vocab_size,
                    stop_token_ids=self._eos,
                )
                self._compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
            return self._compiler


class _Matcher:
    def __init__(self, compiled: xgrammar.CompiledGrammar, words: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._rows = np.empty((1, words), np.int32)
        self._filled = False

    @property
    def mask(self) -> np.ndarray:
        if not self._filled:
            self._rows.fill(ALL)  # the library leaves a mask that restricts nothing as it is
            self._matcher.fill_next_token_bitmask(self._rows)
            self._filled = True
        return self._rows[0]

    def accept(self, token: int) -> bool:
        if not self._matcher.accept_token(token):
            return False
        if self._matcher.is_terminated():  # by an end of the sequence
            self._matcher.rollback(1)
            return False
        self._filled = False
        return True

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        self._filled = False


def _compile(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> xgrammar.CompiledGrammar:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:  # a schema allows what it does not mention: strict_mode would forbid it
            return compiler.compile_json_schema(grammar.text, strict_mode=False, any_whitespace=False)
        case GrammarKind.REGEX:
            return compiler.compile_regex(grammar.text)
        case GrammarKind.STRUCTURAL_TAG:
            return compiler.compile_structural_tag(grammar.text)


def _texts(model: Path, vocab_size: int) -> list[str]:
    """Token texts by id, in the byte-level alphabet; special tokens and gaps are empty."""
    try:
        tokenizer = load_tokenizer(model)
    except ValueError as error:
        raise GrammarError(f"the worker's checkpoint has no usable tokenizer: {error}") from error
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    texts = [""] * vocab_size
    for text, token in tokenizer.get_vocab().items():
        if token < vocab_size and token not in special:
            texts[token] = text
    return texts
