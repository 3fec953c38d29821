"""A client's grammar as a grammar of llguidance, and whether it compiles within limits.

Everything here may take long for a hostile text: checker.py runs it in processes that can be killed.
"""

import functools
import json

import llguidance

from millrace_common.grammar import pattern, text
from millrace_common.grammar.schema import Refused, normal
from millrace_common.json_values import Json, JsonObject

# JSON has one form: on one line, with a space behind commas and colons, each string spelled in one way. With free white
# space a model may indent until its tokens are used up; see pattern.UNWRITABLE for the escapes.
OPTIONS = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}
# The first line of every grammar. Where only one text can follow, the library would ask for the tokens that a tokenizer
# makes of it, added tokens among them.
HEAD = '%llguidance {"no_forcing": true}'
# Of one grammar and of one mask; docs/reference/api-tools.md has what they come to.
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
ONE_OF = "oneOf constraints are not supported"  # where the library cannot prove that options exclude each other
OPTIONS_OVERLAP = (
    "two options may hold at once; only options that exclude each other by type, const, enum or a required property "
    "are supported. Use anyOf"
)
MAX_MESSAGE = 200
MAX_TOKENS = 1 << 18  # of a vocabulary whose special tokens a grammar names


class GrammarError(Exception):
    """The grammar cannot be used. The message is for the client."""


def source(kind: str, given: str) -> str:
    """Raises GrammarError."""
    if problem := text.problem(kind, given):
        raise GrammarError(problem)
    try:
        match kind:
            case text.JSON_SCHEMA:
                schema, places = normal(json.loads(given))
                made = of_json(schema)
                if problem := compiles(made):
                    at = _culprit(schema, places)
                    raise GrammarError(
                        f"at {at}/oneOf: {OPTIONS_OVERLAP}" if ONE_OF in problem else f"at {at}: {problem}"
                    )
                return made
            case text.REGEX:
                made = f"start: {terminal(pattern.whole(given))}"
            case _:
                made = given
    except (Refused, pattern.PatternError) as error:
        raise GrammarError(str(error)) from error
    if problem := compiles(made):
        raise GrammarError(problem)
    return made


def of_json(schema: JsonObject) -> str:
    return f"start: {inline(schema)}"


def terminal(expression: str) -> str:
    """As a part of a rule. `expression`: of pattern.py."""
    return f"/{expression}/" if expression else '""'


def inline(schema: JsonObject) -> str:
    """As a part of a rule."""
    return f"%json {json.dumps({'x-guidance': OPTIONS, **schema})}"


def lark(made: str) -> str:
    return str(llguidance.LLMatcher.grammar_from_lark(f"{HEAD}\n{made}"))


def compiles(made: str) -> str:
    """What is wrong with a grammar; empty: nothing."""
    matcher = llguidance.LLMatcher(_bytes(), lark(made), limits=LIMITS, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    message = clear(matcher.get_error())
    return "it allows no text" if message == "NoExtensionBias" else message


def clear(message: str) -> str:
    """An error of llguidance in one line."""
    lines = [line.strip() for line in message.removesuffix("<non-verbose/>").splitlines()]
    line = " ".join(line for line in lines if line and set(line) - set("^ |"))
    return line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}..."


def _culprit(schema: JsonObject, places: dict[int, str]) -> str:
    """The pointer of the deepest part that does not compile by itself."""
    definitions, part, at = schema.get("$defs", {}), schema, "#"
    while True:
        at = places.get(id(part), at)
        parts = list(_parts(part))
        if part is schema:
            parts += definitions.values()
        failing = (one for one in parts if isinstance(one, dict) and compiles(of_json({**one, "$defs": definitions})))
        if (found := next(failing, None)) is None or found is part:
            return at
        part = found


def _parts(schema: JsonObject) -> list[Json]:
    parts: list[Json] = []
    for key in ("properties", "patternProperties"):
        parts += schema.get(key, {}).values()
    for key in ("prefixItems", "allOf", "anyOf", "oneOf"):
        parts += schema.get(key, [])
    return parts + [schema[key] for key in ("items", "additionalProperties") if key in schema]


class _Bytes:
    """A vocabulary of bytes, with ids enough for the special tokens that a grammar may name."""

    eos_token_id, bos_token_id = 256, None
    tokens = [bytes([byte]) for byte in range(256)] + [b""] * (MAX_TOKENS - 256)
    special_token_ids = range(256, MAX_TOKENS)

    def __call__(self, data: bytes) -> list[int]:
        return list(data)


@functools.cache
def _bytes() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=MAX_TOKENS, eos_token=[256])
