"""llguidance on the trained model: whatever is sampled, the text is in the grammar, and the same in every schedule."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from engine.drafted_masks import bits_of, check_masks
from engine.drafting import rank_of
from engine.harness import request
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from millrace_common.grammar.source import GrammarError
from millrace_common.grammar.text import MAX_BYTES, MAX_DEPTH
from millrace_common.grammar.text import REGEX as REGEX_KIND
from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.core import Failure, FinishReason, Grammar, GrammarKind, Request, Submit
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.grammar.grammars import Grammars, Matcher
from millrace_serve.engine.grammar.llguidance_compiler import LlguidanceCompiler
from millrace_testing import paths
from millrace_testing.examples import examples
from tokenizers import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 1},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
REGEX = r"(yes|no): \d{2,4} [a-f]{1,6}x{3}"
JSON, WORDS = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)), Grammar(GrammarKind.REGEX, REGEX)
TOKENIZER = Tokenizer.from_file(str(paths.TINY / "tokenizer.json"))
EOS, ASSISTANT = 1, 4
CALL = """start: "<call>" %json {"type": "integer", "minimum": 1, "maximum": 9} "</call>" """


def tiny_engine(**config: object) -> Engine:
    limits = EngineConfig.model_validate(
        {"num_pages": 60, "page_size": 16, "max_model_len": 256, "max_running": 6, "max_prefill_tokens": 64, **config}
    )
    return rank_of(limits).engine()


def ask(room: int, grammar: Grammar | None, **fields: object) -> Request:
    return request(room, list(range(20 + room, 50 + room)), **{"max_tokens": 90, "grammar": grammar, **fields})


REQUESTS = [
    ask(room, grammar, ignore_eos=grammar is None, temperature=temperature, seed=room, **extra)
    for room, (grammar, temperature, extra) in enumerate(
        [
            (JSON, 0.0, {}),
            (WORDS, 0.0, {}),
            (None, 0.0, {"max_tokens": 24}),
            (JSON, 1.0, {"logprobs": 2}),
            (WORDS, 1.5, {"top_k": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.5}),
            (JSON, 2.0, {"top_p": 0.9, "logit_bias": {EOS: 100.0, 40: -100.0}}),
        ],
        start=1,
    )
]


def run(engine: Engine, requests: list[Request]) -> dict[int, list[int]]:
    """Output tokens by room. All of the requests end in good order."""
    tokens: dict[int, list[int]] = {r.id.room: r.token_ids[len(r.token_ids) - r.num_prior_outputs :] for r in requests}
    left = {r.id.room for r in requests}
    for one in requests:
        engine.submit(Submit(one))
    while left:
        for output in engine.step().outputs:
            tokens[output.id.room] += [token.token_id for token in output.tokens]
            if output.finish is not None:
                assert output.finish in (FinishReason.STOP, FinishReason.LENGTH), output
                left.discard(output.id.room)
    return tokens


def check_text(one: Request, tokens: list[int]) -> None:
    grammar = one.sampling.grammar
    if grammar is None:
        assert len(tokens) == one.sampling.max_tokens
        return
    assert tokens[-1] == EOS, TOKENIZER.decode(tokens)
    text = TOKENIZER.decode(tokens[:-1], skip_special_tokens=False)
    if grammar == JSON:
        Draft202012Validator(SCHEMA).validate(json.loads(text))
    else:
        assert re.fullmatch(REGEX, text), text


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """Each request by itself, without overlap."""
    engine = tiny_engine(overlap=False)
    tokens = {}
    for one in REQUESTS:
        tokens |= run(engine, [one])
        check_text(one, tokens[one.id.room])
    engine.close()
    return tokens


@pytest.mark.parametrize("config", [{"num_pages": 18, "prefix_cache": False}, {"max_running": 2}])
def test_same_text_in_every_schedule(alone: dict[int, list[int]], config: dict[str, object]) -> None:
    """With few pages a second time, when all grammars are compiled, so that all requests run together."""
    engine = tiny_engine(**config)
    tight = config.get("num_pages") == 18
    assert run(engine, REQUESTS) == alone and (not tight or run(engine, REQUESTS) == alone)
    assert (engine.load().counters["preemptions"] > 0) is tight
    engine.close()


def test_same_text_after_a_retry(alone: dict[int, list[int]]) -> None:
    """Attempts that are given a part of the answer finish it, wherever it was cut."""
    engine, again = tiny_engine(), []
    for one in REQUESTS:
        prior = len(alone[one.id.room]) // 2
        ids = one.token_ids + alone[one.id.room][:prior]
        again.append(msgspec.structs.replace(one, token_ids=ids, num_prior_outputs=prior))
    assert run(engine, again) == alone
    engine.close()


@pytest.fixture(scope="module")
def compiler() -> Iterator[LlguidanceCompiler]:
    made = LlguidanceCompiler(paths.TINY, 1024, [EOS])
    yield made
    made.close()


def compile(compiler: LlguidanceCompiler, grammar: Grammar) -> Callable[[], Matcher]:
    return compiler.compile(grammar, threading.Event())


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type": "strng"}', "at #/type: must be one or more of"),
        (
            GrammarKind.JSON_SCHEMA,
            '{"properties": {"a~/b": {"not": {"type": "string"}}}}',
            "at #/properties/a~0~1b/not: is not supported",
        ),
        (GrammarKind.JSON_SCHEMA, "{", "not valid JSON"),
        (GrammarKind.JSON_SCHEMA, "[]", "must be a JSON object"),
        (GrammarKind.JSON_SCHEMA, '{"enum": []}', "enum"),
        (GrammarKind.JSON_SCHEMA, '{"items":' * 65 + "{}" + "}" * 65, f"more than {MAX_DEPTH} deep"),
        (GrammarKind.JSON_SCHEMA, "[" * 60_000, "not valid JSON"),
        (
            GrammarKind.JSON_SCHEMA,
            '{"pattern": "(", "type": "string"}',
            "at #/pattern: the parenthesis at character 0 is not closed",
        ),
        (GrammarKind.REGEX, "(", "parenthesis"),
        (GrammarKind.REGEX, "(?=a)b", "look-around"),
        (GrammarKind.REGEX, "(" * 500 + "a" + ")" * 500, "nested"),
        (GrammarKind.REGEX, "", "0 bytes"),
        (GrammarKind.REGEX, "x" * (MAX_BYTES[REGEX_KIND] + 1), f"1 to {MAX_BYTES[REGEX_KIND]}"),
        (GrammarKind.REGEX, "(?:a?b?c?)*" * 300, "too many expressions"),
        (GrammarKind.LARK, "start: a", "a"),
        (GrammarKind.LARK, "start: <[99999999]>", "range"),
    ],
)
def test_refusals_are_one_clear_line(compiler: LlguidanceCompiler, kind: GrammarKind, text: str, words: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compile(compiler, Grammar(kind, text))
    message = str(caught.value)
    assert words in message and "cpp" not in message and "\n" not in message and len(message) < 300


def test_worker_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match="no usable tokenizer"):
        compile(LlguidanceCompiler(tmp_path, 1024, [EOS]), JSON)


def test_special_tokens_and_padding_are_never_allowed(compiler: LlguidanceCompiler) -> None:
    matcher = compile(compiler, Grammar(GrammarKind.REGEX, r"[\s\S]*"))()
    bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
    assert bits[EOS] and not bits[[0, 2, 3, ASSISTANT]].any() and bits.sum() > 900
    padded = compile(LlguidanceCompiler(paths.TINY, 1100, [EOS]), Grammar(GrammarKind.REGEX, ".*"))()
    assert not np.unpackbits(padded.mask.view(np.uint8), bitorder="little")[1024:1100].any()


def test_end_in_the_last_bit_of_a_word() -> None:
    mask = LlguidanceCompiler(paths.TINY, 1024, [EOS, 31]).free(
        Grammar(GrammarKind.REGEX, "a", forbidden_before=(64, 5000))
    )
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits == 0).tolist() == sorted((EOS, 31, 64))


def test_form_of_routers(compiler: LlguidanceCompiler) -> None:
    matcher = compile(compiler, Grammar(GrammarKind.LARK, CALL))()
    assert all(matcher.accept(token) for token in TOKENIZER.encode("<call>7</call>", add_special_tokens=False).ids)
    assert bits_of(matcher.mask) == [EOS]
    assert not compile(compiler, Grammar(GrammarKind.LARK, CALL))().accept(TOKENIZER.encode("7").ids[0])


@pytest.fixture(scope="module")
def grammars(compiler: LlguidanceCompiler) -> Iterator[Grammars]:
    """With one that is compiled once for all examples."""
    made = Grammars(compiler)
    yield made
    made.close()


@examples(15)
@given(seed=st.integers(0, 2**32), prior=st.integers(0, 12))
def test_walk_depends_on_the_outputs_only(grammars: Grammars, seed: int, prior: int) -> None:
    """Any way through the masks: told token by token, or all at once as another attempt is."""
    rng, tokens = np.random.default_rng(seed), []
    walk = grammars.walk(ask(1, JSON))
    while len(tokens) < 12:
        token = int(rng.choice(bits_of(walk.mask)))
        if token == EOS:
            break
        tokens.append(token)
        assert walk.accept([token]) is None
    base, prior = list(range(20, 30)), min(prior, len(tokens))
    other = grammars.walk(request(1, base + tokens[:prior], prior=prior, grammar=JSON))
    assert other.accept(tokens[prior:]) is None
    assert (other.mask == walk.mask).all()


@pytest.mark.parametrize("grammar", [JSON, WORDS, msgspec.structs.replace(WORDS, after_token_id=ASSISTANT)])
def test_masks_along_drafts(compiler: LlguidanceCompiler, grammar: Grammar) -> None:
    grammars, after, one = Grammars(compiler), grammar.after_token_id, ask(1, grammar)
    seen = [check_masks(lambda: grammars.walk(one), seed, 1024, EOS, after) for seed in range(40)]
    assert {count for count, _ in seen} == {1, 2, 3, 4}
    assert any(passed for _, passed in seen) is (after is not None)
    grammars.close()


def test_draft_that_ends_the_sequence(compiler: LlguidanceCompiler) -> None:
    grammars = Grammars(compiler)
    walk = grammars.walk(ask(1, Grammar(GrammarKind.REGEX, "yes|no")))
    outputs = TOKENIZER.encode("no", add_special_tokens=False).ids
    masks = walk.masks([*outputs, EOS, 50])
    assert len(masks) == 1 + len(outputs) and bits_of(masks[-1]) == [EOS]
    assert walk.accept(outputs) is None and bits_of(walk.mask) == [EOS]
    grammars.close()


def test_end_of_the_sequence_among_earlier_outputs_is_refused() -> None:
    """The library's matcher cannot be asked anything behind it."""
    grammars = Grammars(LlguidanceCompiler(paths.TINY, 1024, [EOS]))
    outputs = TOKENIZER.encode("yes", add_special_tokens=False).ids
    grammar = Grammar(GrammarKind.REGEX, "yes|no")
    replay = request(1, [20, *outputs, EOS], prior=len(outputs) + 1, ignore_eos=False, grammar=grammar)
    refused = grammars.walk(replay)
    assert isinstance(refused, Failure) and f"grammar does not allow token {EOS}" in refused.message


def test_vocabulary_that_the_library_refuses_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llguidance.LLTokenizer", Mock(side_effect=ValueError("vocabulary of nothing")))
    grammars = Grammars(LlguidanceCompiler(paths.TINY, 1024, [EOS]))
    refused = grammars.walk(ask(1, WORDS, ignore_eos=False))
    assert isinstance(refused, Failure) and "vocabulary of nothing" in refused.message
