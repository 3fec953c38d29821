"""Whatever a grammar of calls lets through is read by the parsers as those calls, and their arguments are right."""

import json
from collections.abc import Callable
from typing import Any

import llguidance
import numpy as np
import pytest
from engine.drafted_masks import bits_of
from jsonschema import Draft202012Validator
from millrace.v1 import common_pb2
from millrace_common.grammar import source
from millrace_common.grammar.source import GrammarError
from millrace_router.text import markers
from millrace_router.text.call_grammar import Calls, call_grammar
from millrace_router.text.call_stream import Offer
from millrace_router.text.chat_format import Style, Tool

EOS, MAX_TOKENS = 256, 600
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "u": {"enum": ["a", 'b"', None, 3]}, "o": {"anyOf": [{"type": "string", "pattern": "^x+$"}, {"type": "null"}]},
        "l": {"type": "array", "items": {"$ref": "#/$defs/i"}, "maxItems": 2}, "any": {"maxLength": 3, "maximum": 5,
                                                                                     "type": ["string", "integer"]},
    },
    "required": ["city", "u"], "additionalProperties": False,
    "$defs": {"i": {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"],
                    "additionalProperties": False}},
}  # fmt: skip
FEW = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}},
    "additionalProperties": {"type": "null"},
}
TOOLS = (
    Tool("weather", None, WEATHER, True), Tool("wea", None, FEW, True),
    Tool("function", None, {"properties": {}, "additionalProperties": False}, True),
)  # fmt: skip
ANSWER = common_pb2.Grammar(json_schema='{"enum": [{"a": 1}, "x", 7]}')
KINDS = {
    "required": (True, True, None),
    "one": (True, False, None),
    "text": (False, True, None),
    "format": (False, True, ANSWER),
}


class Vocabulary:
    eos_token_id, bos_token_id = EOS, None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>", *(mark.encode() for mark in markers.ALL))
    special_token_ids = range(256, len(tokens))

    def __call__(self, data: bytes) -> list[int]:
        return []


IDS = {mark: 257 + i for i, mark in enumerate(markers.ALL)}
TOKENIZER = llguidance.LLTokenizer(
    llguidance.TokenizerWrapper(Vocabulary()), n_vocab=len(Vocabulary.tokens), eos_token=[EOS]
)


def drawn(grammar: common_pb2.Grammar, rng: np.random.Generator) -> str | None:
    """None: too long."""
    matcher = llguidance.LLMatcher(TOKENIZER, source.lark(grammar.lark), limits=source.LIMITS, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = b""
    for _ in range(MAX_TOKENS):
        legal = bits_of(np.frombuffer(matcher.compute_bitmask(), np.uint8))
        assert legal, (matcher.get_error(), data)
        ends = [token for token in legal if token >= 256 or token in b'"}]<\n']
        token = int(rng.choice(ends if ends and rng.random() < 0.4 else legal))
        if token == EOS:
            return data.decode("utf-8", "replace")
        data += Vocabulary.tokens[token]
        assert matcher.consume_token(token)
    return None


def parsed(style: Style, text: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = style.parser(Offer([tool.name for tool in TOOLS], certain=True))
    said, calls = "", dict[int, list[str]]()
    for part in parser.push(text, last=True):
        if isinstance(part, str):
            said += part
        else:
            call = calls.setdefault(part.index, ["", ""])
            call[0], call[1] = call[0] + part.name, call[1] + part.arguments
    return said, [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token_of", [IDS.get, lambda mark: None], ids=["tokens", "text"])
@pytest.mark.parametrize("style", Style)
def test_calls_are_read_as_they_were_allowed(style: Style, token_of: Callable[[str], int | None], kind: str) -> None:
    required, parallel, answer = KINDS[kind]
    grammar = call_grammar(Calls(style, TOOLS, required, parallel, answer), token_of)
    rng, seen = np.random.default_rng(7), set()
    for text in filter(None, (drawn(grammar, rng) for _ in range(25))):
        said, calls = parsed(style, text)
        for name, arguments in calls:
            (tool,) = (tool for tool in TOOLS if tool.name == name)
            Draft202012Validator(tool.parameters).validate(arguments)
            assert isinstance(arguments, dict)
        assert calls or not required
        assert len(calls) < 2 or parallel
        if required or (answer and calls):
            assert said.strip() == "", "calls alone"
        elif answer:
            assert json.loads(said) in ({"a": 1}, "x", 7)
        seen.add(len(calls))
    spelled = kind == "text" and token_of != IDS.get  # a mark of 20 letters, by chance
    assert seen & {1, 2, 3} or spelled, "some have calls"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"anyOf": [{"required": ["a"]}]}, "#/anyOf: is not supported for all parameters"),
        ({"properties": {'a"b': {}}}, "#/properties/a%22b: has a name"),
    ],
)
def test_what_dsml_cannot_hold(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarError, match="the parameters of f cannot be kept") as caught:
        call_grammar(Calls(Style.V32, (Tool("f", None, parameters, True),), True, True), IDS.get)
    assert words in str(caught.value)


def test_what_is_not_strict_promises_nothing() -> None:
    tool = Tool("f", None, {"properties": {"a": {"contains": {}}}})
    for style in Style:
        grammar = call_grammar(Calls(style, (tool,), False, True), IDS.get)
        assert source.compiles(grammar.lark) == ""


UNIONS = [  # what "a" may be
    {"a": [{"type": "string"}, {"$ref": "#/$defs/a"}]},
    {**{"abcdefgh"[i]: [{"$ref": f"#/$defs/{'bcdefghi'[i]}"}] * 4 for i in range(8)}, "i": [{"type": "null"}]},
    {"a": [{"$ref": "#/$defs/0"}],
     **{str(i): [{"$ref": f"#/$defs/{i + 1}"}] for i in range(1100)}, "1100": [{"type": "null"}]},
]  # fmt: skip


@pytest.mark.parametrize("unions", UNIONS, ids=["endless", "wide", "deep"])
def test_unions_by_references_are_made_once(unions: dict[str, Any]) -> None:
    defs = {name: {"anyOf": options} for name, options in unions.items()}
    parameters = {"properties": {"x": {"$ref": "#/$defs/a"}}, "additionalProperties": False, "$defs": defs}
    made = call_grammar(Calls(Style.V32, (Tool("f", None, parameters, True),), True, True), IDS.get)
    assert made.lark.count('"string"' if len(unions) == 1 else '"null"') <= 2 and len(made.lark) < 100_000
