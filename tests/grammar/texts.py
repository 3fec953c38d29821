"""Which texts a grammar allows, byte by byte, and texts that it allows, drawn token by token."""

import functools
import json
import threading
from typing import Any

import llguidance
import numpy as np
from engine.drafted_masks import bits_of
from engine.harness import request
from millrace_common.grammar import source
from millrace_serve.engine.core import Grammar
from millrace_serve.engine.grammar.grammars import Grammars, Walk
from millrace_serve.engine.grammar.llguidance_compiler import LlguidanceCompiler
from millrace_testing import paths
from tokenizers import Tokenizer

TOKENIZER = Tokenizer.from_file(str(paths.TINY / "tokenizer.json"))
EOS, MAX_TOKENS = 1, 400
ENDS = {token for token in range(1024) if TOKENIZER.decode([token]) in ('"', "}", "]", ", ", '"}', "<", "\n")}


def allows(grammar: str, text: str) -> bool:
    """Whether the text is whole. `grammar`: of source.py."""
    matcher, data = _begun(grammar).deep_copy(), text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


@functools.lru_cache(1)
def _begun(grammar: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(source._bytes(), source.lark(grammar), limits=source.LIMITS, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def schema(value: Any) -> str:
    """Raises GrammarError."""
    return source.source("json_schema", json.dumps(value))


def drawn(compiler: LlguidanceCompiler, grammar: Grammar, seed: int) -> str | None:
    """A text through the masks of the tiny model's vocabulary, ends preferred; None: too long."""
    rng = np.random.default_rng(seed)
    start = compiler.compile(grammar, threading.Event())
    walk, tokens = Walk(start, None, compiler.free(grammar)), []
    while len(tokens) < MAX_TOKENS:
        legal = bits_of(walk.mask)
        short = [token for token in legal if token == EOS or token in ENDS]
        token = int(rng.choice(short if short and rng.random() < 0.5 else legal))
        if token == EOS:
            return TOKENIZER.decode(tokens, skip_special_tokens=False)
        tokens.append(token)
        assert walk.accept([token]) is None
    return None


def refusal(compiler: LlguidanceCompiler, grammar: Grammar) -> str:
    """What a request is told; empty: its grammar can be used."""
    grammars = Grammars(compiler)
    walk = grammars.walk(request(1, [20], grammar=grammar))
    return "" if isinstance(walk, Walk) else walk.message
