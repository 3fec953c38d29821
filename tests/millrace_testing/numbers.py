"""Every number that a request can hold, found in the types themselves, and the values that such numbers should survive.

A *leaf* is a request that has one number in one field, with whatever else that field needs.
"""

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from jsonschema_specifications import REGISTRY

T = TypeVar("T")
SHARE = int(os.environ.get("MILLRACE_NUMBERS_SHARE", 14))  # one in so many pairs of field and value is tried; 1: all
NUMBER = "@@number@@"  # where the literal belongs
KEY = "5"  # of a map from strings
LITERALS = (
    *("0", "-0", "1", "-1", "0.5", "1e-9", "1e0", "-1e30", "1e30", "1e308", "1e400", "-1e400", "1e-400"),
    *("Infinity", "-Infinity", "NaN", "true", '"1"', "[1]", "{}"),
    *(str(number + more) for bits in (31, 32, 63, 64) for number in (2**bits,) for more in (-1, 0)),
    *(str(-(2**bits)) for bits in (31, 63)),
    *("1" + "0" * digits for digits in (400, 5000)),
    *("-1" + "0" * digits for digits in (400, 5000)),
)
UNREADABLE = ("Infinity", "-Infinity", "NaN", "1" + "0" * 5000, "-1" + "0" * 5000)  # no JSON, or nothing Python reads
SCHEMA_KEYWORDS = {  # of JSON schemas, by the type that they restrict
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems", "minContains", "maxContains"),
    "object": ("minProperties", "maxProperties"),
}


def some(leaves: Iterable[T]) -> Iterator[tuple[T, str]]:
    """A share of the literals with each leaf, others with the next one."""
    for index, leaf in enumerate(leaves):
        yield from ((leaf, literal) for literal in LITERALS[index % SHARE :: SHARE])


class Leaf(NamedTuple):
    names: tuple[str, ...]  # of the fields down to the number
    body: Any  # with NUMBER in it

    def text(self, literal: str, base: dict[str, Any]) -> str:
        """The body as JSON: a key stays a string."""
        body = self.body | {name: value for name, value in base.items() if NUMBER not in str(self.body.get(name))}
        text = json.dumps(body)
        return text.replace(f'"{NUMBER}": ', f"{json.dumps(literal.strip(chr(34)))}: ").replace(f'"{NUMBER}"', literal)


def json_leaves(schema: dict[str, Any], schemas: dict[str, Any], names: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Of a JSON schema as OpenAPI has it. Numbers, and keys of maps to numbers."""
    schema = _resolved(schema, schemas)
    if schema.get("type") in ("integer", "number"):
        yield Leaf(names, NUMBER)
    for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from json_leaves(branch, schemas, names)
    if items := schema.get("items"):
        yield from (leaf._replace(body=[leaf.body]) for leaf in json_leaves(items, schemas, names))
    if isinstance(extra := schema.get("additionalProperties"), dict):
        for leaf in json_leaves(extra, schemas, names):
            yield leaf._replace(body={KEY: leaf.body})
            if leaf.body == NUMBER:
                yield leaf._replace(body={NUMBER: 1})
    for name, part in schema.get("properties", {}).items():
        for leaf in json_leaves(part, schemas, (*names, name)):
            yield leaf._replace(body=_required(schema, schemas) | {name: leaf.body})


def schema_leaves() -> Iterator[dict[str, Any]]:
    """JSON schemas with NUMBER, one for each keyword that takes one; checked against the keywords that there are."""
    known = {name for names in SCHEMA_KEYWORDS.values() for name in names}
    assert known == set(_numeric_keywords())
    for kind, keywords in SCHEMA_KEYWORDS.items():
        for keyword in keywords:
            inner = {"type": kind, keyword: NUMBER} | ({"items": {"type": "string"}} if kind == "array" else {})
            yield {"type": "object", "properties": {"x": inner}, "required": ["x"], "additionalProperties": False}
    for keyword in ("const", "default"):
        yield {"type": "object", "properties": {"x": {keyword: NUMBER}}, "required": ["x"]}
    yield {"type": "object", "properties": {"x": {"enum": [NUMBER]}}, "required": ["x"]}


def _numeric_keywords() -> Iterator[str]:
    for name, part in REGISTRY.contents("https://json-schema.org/draft/2020-12/meta/validation")["properties"].items():
        if '"number"' in (text := json.dumps(part)) or '"integer"' in text or "nonNegativeInteger" in text:
            yield name


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    return schemas[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema


def _required(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    return {name: smallest(schema["properties"][name], schemas) for name in schema.get("required", ())}


def smallest(schema: dict[str, Any], schemas: dict[str, Any]) -> Any:
    """A value that the schema allows."""
    schema = _resolved(schema, schemas)
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        return smallest(choice, schemas)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    if schema.get("type") == "object":
        return _required(schema, schemas)
    return {"string": "assistant", "array": [], "boolean": True, "null": None}.get(schema.get("type", "string"), 1)


# ---------------------------------------------------------------------------------------------------- protobuf

_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
_WHOLE = (0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-9, 1e-45, 1e30, -1e30, 3.4e38, math.inf, -math.inf, math.nan)
_REALS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)


class ProtoLeaf(NamedTuple):
    names: tuple[str, ...]
    value: float
    message: Message


def proto_leaves(kind: Descriptor) -> Iterator[ProtoLeaf]:
    """Of a message type: a share of its numeric fields with the values that fit; of enums, values that they lack."""
    yield from itertools.islice(_proto_leaves(kind), 0, None, SHARE)


def _proto_leaves(kind: Descriptor, names: tuple[str, ...] = ()) -> Iterator[ProtoLeaf]:
    for field in kind.fields:
        path = (*names, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield from _map_leaves(kind, field, path)
        elif field.message_type is not None:
            for leaf in _proto_leaves(field.message_type, path):
                yield leaf._replace(message=_holding(kind, field, leaf.message))
        else:
            for value in _values(field):
                yield ProtoLeaf(path, value, _holding(kind, field, value))


def _map_leaves(kind: Descriptor, field: FieldDescriptor, path: tuple[str, ...]) -> Iterator[ProtoLeaf]:
    assert field.message_type is not None
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for of, pairs in ((key, [(k, 1) for k in _values(key)]), (value, [(5, v) for v in _values(value)])):
        for pair in pairs:
            message = GetMessageClass(kind)()
            getattr(message, field.name)[pair[0]] = pair[1]
            yield ProtoLeaf(path, pair[0] if of is key else pair[1], message)


def _holding(kind: Descriptor, field: FieldDescriptor, value: Any) -> Message:
    return GetMessageClass(kind)(**{field.name: [value] if field.is_repeated else value})


def _values(field: FieldDescriptor) -> list[float]:
    if field.cpp_type in _REALS:
        return list(_FLOATS)
    if field.cpp_type not in _BITS:
        return []
    low, high = _BITS[field.cpp_type]
    known = set() if field.enum_type is None else {value.number for value in field.enum_type.values}
    return [value for value in _WHOLE if low <= value <= high and value not in known]
