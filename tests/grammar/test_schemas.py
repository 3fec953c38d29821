"""Schemas of all kinds: numbers, patterns, models of pydantic, and generated ones."""

import datetime
import decimal
import enum
import ipaddress
import json
import operator
import re
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from grammar.texts import allows, drawn, refusal, schema
from hypothesis import assume, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from millrace_common.grammar import keywords, pattern
from millrace_common.grammar.source import GrammarError
from millrace_serve.engine.core import Grammar, GrammarKind
from millrace_serve.engine.grammar.llguidance_compiler import LlguidanceCompiler
from millrace_testing import paths
from millrace_testing.examples import examples
from pydantic import (
    AnyUrl,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    RootModel,
    TypeAdapter,
    create_model,
)


class Colour(enum.Enum):
    RED, GREEN = "red", "green"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    barks: bool


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Node(BaseModel):
    value: int
    next: "Node | None" = None
    children: "list[Node]" = []


class Tree(RootModel[dict[str, "Tree"]]):
    pass


MODELS: dict[str, Any] = {
    "union": int | str | None | list[int], "models": Cat | Dog, "discriminator": Owner, "recursive": Node,
    "recursive root": Tree, "enum": Colour, "literal": Literal["a", 1, None, True], "optional": Cat | None,
    "tuple": tuple[int, str], "tuple of any length": tuple[int, ...], "dict": dict[str, int],
    "dict of an enum": dict[Colour, int], "dict of a pattern": dict[Annotated[str, Field(pattern="^k")], int],
    "dict of short names": dict[Annotated[str, Field(max_length=3)], int], "dict of uuid": dict[uuid.UUID, int],
    "at least one": Annotated[dict[str, int], Field(min_length=1)], "nested": list[dict[str, Cat | None]],
    "between": Annotated[float, Field(gt=0, lt=1)], "steps": Annotated[int, Field(ge=0, le=10, multiple_of=5)],
    "positive": PositiveFloat, "decimal": decimal.Decimal, "pattern": Annotated[str, Field(pattern=r"^#[0-9a-f]{6}$")],
    "lengths": Annotated[str, Field(min_length=1, max_length=9)], "items": Annotated[list[int], Field(max_length=3)],
    "datetime": datetime.datetime, "date": datetime.date, "time": datetime.time, "timedelta": datetime.timedelta,
    "uuid": uuid.UUID, "url": AnyUrl, "ipv4": ipaddress.IPv4Address, "ipv6": ipaddress.IPv6Address, "bytes": bytes,
    "base64": Base64Bytes, "any": Any, "forbid": create_model("S", a=(int, ...), __config__=ConfigDict(extra="forbid")),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Iterator[LlguidanceCompiler]:
    made = LlguidanceCompiler(paths.TINY, 1024, [1])
    yield made
    made.close()


@pytest.mark.parametrize("name", MODELS)
def test_models_of_pydantic(compiler: LlguidanceCompiler, name: str) -> None:
    wanted = TypeAdapter(MODELS[name]).json_schema()
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(wanted))
    assert refusal(compiler, grammar) == ""
    texts = [text for seed in range(6) if (text := drawn(compiler, grammar, seed)) is not None]
    for text in texts:
        Draft202012Validator(wanted).validate(json.loads(text))
    assert texts or name in ("recursive root", "nested", "any"), "they may grow too long"


@pytest.mark.parametrize("text", ["set", "frozenset"])
def test_models_that_are_refused(text: str) -> None:
    with pytest.raises(GrammarError, match="at #/uniqueItems"):
        schema(TypeAdapter({"set": set[str], "frozenset": frozenset[int]}[text]).json_schema())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"x-guidance": {"lenient": True}, "type": "integer"}, '"a"'),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"\\u0061": "x"}'),
        ({"const": 2**53 - 1}, str(2**53)),
        ({"type": "number", "exclusiveMaximum": 1}, "0.99999999999999999999"),
        ({"type": "number", "exclusiveMinimum": 0}, f"0.{'0' * 400}1"),
        ({"type": "string", "pattern": '^"q"$'}, '""q""'),
        ({"type": "string", "pattern": "^.$"}, '"\\r"'),
        ({"type": "string", "pattern": "^[a&&b]$"}, '"c"'),
        ({"type": "string", "format": "date"}, '"2023-02-29"'),
        ({"minimum": 5, "exclusiveMinimum": True, "type": "integer"}, "5"),
        ({"items": [{"type": "integer"}], "additionalItems": False}, "[1, 2]"),
        ({"anyOf": [{}], "additionalItems": False, "items": [{"type": "integer"}]}, "[1, 2]"),
        ({"properties": {"a": {"uniqueItems": False}}, "required": ["b"]}, '{"a": 1}'),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}], "maximum": 3}, "4"),
        ({"dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
        ({"patternProperties": {"^a": {"type": "integer"}}, "properties": {"ab": {}}}, '{"ab": "x"}'),
    ],
)  # fmt: skip
def test_what_must_not_come(given: dict[str, Any], text: str) -> None:
    assert not allows(schema(given), text)


@pytest.mark.parametrize(
    ("given", "pointer"),
    [
        ({"const": 2**53}, "#/const"),
        ({"type": "integer", "minimum": 2**63}, "#/minimum"),
        ({"type": "number", "maximum": 2**63}, "#/maximum"),
        ({"type": "string", "minLength": 100_001}, "#/minLength"),
        ({"type": "string", "maxLength": -1}, "#/maxLength"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "#"),
        ({"type": "string", "minLength": 3, "pattern": "^a?$"}, "#"),
        ({"not": {"title": "all"}}, "#"),
        ({"enum": [{"a": -(10**400)}]}, "#/enum/0/a"),
        ({"type": "number", "multipleOf": 10**400}, "#/multipleOf"),
        ({"type": "number", "exclusiveMinimum": float("-inf")}, "#/exclusiveMinimum"),
        ({"const": "a\x00"}, "#/const"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "#/allOf/0/multipleOf"),
        ({"prefixItems": [{}], "additionalItems": False}, "#/additionalItems"),
        ({"type": "object", "minProperties": 2}, "#/minProperties"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf"),
        ({"type": "object", "oneOf": [{"properties": {"k": {"const": k}}} for k in "ab"]}, "#/oneOf"),
        ({"required": ["k"], "oneOf": [{"properties": {"k": {"const": k}}} for k in "ab"]}, "#/oneOf"),
        (
            {
                "type": ["object", "null"],
                "required": ["k"],
                "oneOf": [{"properties": {"k": {"const": k}}} for k in "ab"],
            },
            "#/oneOf",
        ),
        ({"format": "iri"}, "#/format"),
        ({"$ref": "http://json-schema.org/draft-07/schema#"}, "#/$ref"),
        ({"$schema": "http://example.com/mine"}, "#/$schema"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "dependentRequired": {}}, "#/dependentRequired"),
        ({"properties": {"a/b~": {"items": {"contains": {}}}}}, "#/properties/a~1b~0/items/contains"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"if": {}, "then": False}}}, "#/$defs/x/if"),
        ({"patternProperties": {"(": {}}}, "#/patternProperties/("),
        ({"properties": {"q": {"patternProperties": {"^a": {}, "b$": {}}}}}, "#/properties/q"),
        (False, "#"),
    ],
)  # fmt: skip
def test_refusals_say_where(given: Any, pointer: str) -> None:
    with pytest.raises(GrammarError) as caught:
        schema(given)
    assert str(caught.value).startswith(f"at {pointer}: ")


@pytest.mark.parametrize(
    ("given", "yes", "no"),
    [
        ({"anyOf": [{"not": {}}, {"type": "string"}]}, '"a"', "1"),
        ({"properties": {"a": {"not": True}}}, '{"b": 1}', '{"a": 1}'),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, str(2**62 + 1), str(2**63)),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, str(2**63 - 1024), "-1"),
        ({"type": "integer", "exclusiveMinimum": 2**53, "maximum": 1e300}, str(2**53 + 2), str(2**53)),
        ({"type": "string", "maxLength": 10**6}, '"a"', "1"),
        ({"type": "object", "propertyNames": {"type": ["string", "null"]}}, '{"a": 1}', "1"),
        ({"contains": {}, "minContains": 0, "type": "array"}, "[]", "1"),
        (
            {"type": "object", "oneOf": [{"properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"]},
            '{"k": "b"}',
            '{"k": "c"}',
        ),
        (
            {"type": "object", "required": ["k"], "oneOf": [{"properties": {"k": {"const": k}}} for k in "ab"]},
            '{"k": "b"}',
            "{}",
        ),
        ({"type": "array", "maxItems": 10**9}, "[1]", "1"),
        ({"type": "string", "pattern": "^(?P<year>\\d{4})$"}, '"2024"', '"24"'),
    ],
)  # fmt: skip
def test_schemas_that_generators_write(given: dict[str, Any], yes: str, no: str) -> None:
    grammar = schema(given)
    assert allows(grammar, yes)
    assert not allows(grammar, no)


WHOLE = st.sampled_from([2**53, 2**60, 2**62, 2**63, 2**64, 10**30, 0]).flatmap(
    lambda x: st.tuples(st.sampled_from([x, -x]), st.sampled_from([0, 1, -1, 2, 511, -1023, 1024, -1025])).map(sum)
)


@examples(30)
@given(least=WHOLE, most=WHOLE, value=WHOLE, excluded=st.booleans())
def test_large_whole_numbers_near_their_bounds(least: int, most: int, value: int, excluded: bool) -> None:
    names = ("exclusiveMinimum", "exclusiveMaximum") if excluded else ("minimum", "maximum")
    try:
        grammar = schema({"type": "integer", **dict(zip(names, (least, most), strict=True))})
    except GrammarError:
        return
    if allows(grammar, str(value)):
        assert least + excluded <= value <= most - excluded


@examples(40)
@given(text=st.text("a.'-_@1", max_size=9).map(lambda text: text + "@b.co") | st.text("a.-@", max_size=9))
@pytest.mark.parametrize("expression", keywords._WITHOUT_LOOK_AHEAD)
def test_patterns_without_look_ahead(expression: str, text: str) -> None:
    text = text.replace("a", "7").replace("@", "") if "\\d" in expression else text
    same = keywords._WITHOUT_LOOK_AHEAD[expression]
    assert bool(re.search(expression, text)) is bool(re.search(same, text))


VALUES = st.one_of(
    st.integers(-30, 30), st.decimals(-99, 99, places=2).map(float), st.sampled_from([0, -0.0, 1e-7, 0.1, 10**15])
)
BOUNDS = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional={"minimum": VALUES, "maximum": VALUES, "exclusiveMinimum": VALUES, "exclusiveMaximum": VALUES,
              "multipleOf": st.sampled_from([1, 2, 3, 0.1, 0.25, 2.5])},
)  # fmt: skip
NEAR = [Decimal(x) for x in ("0", "1", "-1", "0.1", "-0.01", "1e-15", "-1e-15", "1e-17", "-1e-17", "1e-25", "-1e-25")]


@examples(30)
@given(bounds=BOUNDS, near=st.sampled_from(NEAR), data=st.data())
def test_numbers_near_their_bounds(bounds: dict[str, Any], near: Decimal, data: st.DataObject) -> None:
    try:
        grammar = schema(bounds)
    except GrammarError:
        return
    centre = data.draw(st.sampled_from([value for key, value in bounds.items() if key != "type"] or [0]))
    with decimal.localcontext(prec=60):
        text = format(Decimal(repr(centre)) + near, "f")
    value, exact = json.loads(text), Decimal(text)
    holds = {"minimum": operator.ge, "maximum": operator.le}
    holds |= {"exclusiveMinimum": operator.gt, "exclusiveMaximum": operator.lt}
    within = all(holds[key](float(value), float(bound)) for key, bound in bounds.items() if key in holds)
    with decimal.localcontext(prec=60):
        within &= "multipleOf" not in bounds or exact % Decimal(repr(bounds["multipleOf"])) == 0
        within &= bounds["type"] == "number" or exact == exact.to_integral_value()
    if not within:
        assert not allows(grammar, text)


LEAVES = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={"minLength": st.integers(0, 3), "maxLength": st.integers(3, 6),
                  "pattern": st.sampled_from(['^"?[a-c]+\\\\?$', "x|^y$", "\\n", "^[^a]*$", "^\\d{2,3}$"])},
    ),
    st.fixed_dictionaries({"type": st.sampled_from(["integer", "number"])},
                          optional={"minimum": st.integers(-9, 0), "exclusiveMaximum": st.integers(1, 99)}),
    st.fixed_dictionaries({"enum": st.lists(st.sampled_from(["a", 1, 2.5, None, True, [1], {"k": "v"}]), min_size=1)}),
    st.just({"type": ["null", "boolean"]}),
)  # fmt: skip


def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", 'c"', "d\n"])
    objects = st.fixed_dictionaries(
        {
            "type": st.just("object"),
            "properties": st.dictionaries(names, inner, max_size=3),
            "required": st.lists(names, max_size=2, unique=True),
            "additionalProperties": inner | st.just(False),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner, "maxItems": st.integers(1, 3)},
        optional={"minItems": st.integers(0, 1), "prefixItems": st.lists(inner, min_size=1, max_size=2)},
    )
    several = st.fixed_dictionaries(
        {},
        optional={
            "anyOf": st.lists(inner, min_size=1, max_size=3),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
        },
    )
    return objects | arrays | several  # fmt: skip


@examples(25)
@given(wanted=st.recursive(LEAVES, grown, max_leaves=6), seed=st.integers(0, 2**32))
def test_generated_schemas(compiler: LlguidanceCompiler, wanted: dict[str, Any], seed: int) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(wanted))
    refused = refusal(compiler, grammar)
    assert refused == "" or "at #" in refused or "no text" in refused, refused
    assume(not refused)
    text = drawn(compiler, grammar, seed)
    assume(text is not None)
    Draft202012Validator(wanted).validate(json.loads(text))


@examples(50)
@given(st.text("<|/>tol_", max_size=24), st.sampled_from([("<|tool", "<|/"), ("</tool>",)]))
def test_texts_without_words(text: str, words: tuple[str, ...]) -> None:
    grammar = f"start: /{pattern.without(words)}/"
    assert allows(grammar, text) is not any(word in text for word in words)


@pytest.mark.parametrize(
    ("expression", "yes", "no"),
    [
        ("a|^b$", ["xax", "b"], ["bb", ""]), ("(^a|b)c", ["acx", "xbc"], ["xac"]), ("^(?:a|b)$", ["a"], ["ab"]),
        (r"\s", ["\ufeff", "\u2028"], ["\x85"]), (r"^\w$", ["_"], ["é"]), (r"^[^\d]$", ["x"], ["7"]),
        (r"^\uD83D\uDE00$", ["😀"], ["x"]), (r"^{x}$", ["{x}"], ["x"]), (r"^a{,2}$", ["a{,2}"], ["aa"]),
        ("^[-a]$", ["-", "a"], ["b"]), (r'^"\\\n$', ['"\\\n'], ['"\\n']), ("", ["", "x"], []),
        (".", ["x"], ["\n", "\u2029"]),
    ],
)  # fmt: skip
def test_patterns_mean_what_they_mean_in_ecmascript(expression: str, yes: list[str], no: list[str]) -> None:
    grammar = schema({"type": "string", "pattern": expression})
    assert all(allows(grammar, json.dumps(text, ensure_ascii=False)) for text in yes)
    assert not any(allows(grammar, json.dumps(text, ensure_ascii=False)) for text in no)
