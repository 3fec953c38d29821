"""Proof that no value satisfies two schemas: then `oneOf` is `anyOf`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_STEPS = 2_000
Resolve = Callable[[str], Any]


class Disjoint:
    """Of one schema in the form that schema.py writes. `resolve`: the target of a `$ref`."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._steps = 0

    def all(self, options: list[Any]) -> bool:
        return all(self.two(a, b) for a, b in itertools.combinations(options, 2))

    def two(self, a: Any, b: Any, refs: int = 8) -> bool:
        """True: proven. False: not."""
        self._steps += 1
        if a is False or b is False:
            return True
        if not isinstance(a, dict) or not isinstance(b, dict) or self._steps > MAX_STEPS:
            return False
        if not _types(a) & _types(b):
            return True
        values, others = _values(a), _values(b)
        if values is not None and others is not None and not values & others:
            return True
        return self._by_part(a, b, refs) or self._by_part(b, a, refs) or self._by_property(a, b, refs)

    def _by_part(self, a: dict[str, Any], b: dict[str, Any], refs: int) -> bool:
        """A part that `a` needs excludes b, or all of its alternatives do."""
        if "$ref" in a and refs and self.two(self._resolve(a["$ref"]), b, refs - 1):
            return True
        if any(self.two(part, b, refs) for part in a.get("allOf", ())):
            return True
        choices = (a[key] for key in ("anyOf", "oneOf") if key in a)
        return any(all(self.two(choice, b, refs) for choice in options) for options in choices)

    def _by_property(self, a: dict[str, Any], b: dict[str, Any], refs: int) -> bool:
        """Both are objects, and a property that one of them needs cannot be one of the other's."""
        if _types(a) & _types(b) != {"object"}:
            return False
        needed = {*a.get("required", ()), *b.get("required", ())}
        return any(self.two(_property(a, name), _property(b, name), refs) for name in needed)


def _types(schema: dict[str, Any]) -> set[str]:
    given = schema.get("type", TYPES)
    types = {given} if isinstance(given, str) else set(given)
    return {"number" if name == "integer" else name for name in types} & _types_of_values(schema)


def _types_of_values(schema: dict[str, Any]) -> set[str]:
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    return set(TYPES) if values is None else {_type(value) for value in values}


def _values(schema: dict[str, Any]) -> set[tuple[str, Any]] | None:
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if values is None or any(isinstance(value, list | dict) for value in values):
        return None
    return {(_type(value), value) for value in values}


def _type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    return "number"


def _property(schema: dict[str, Any], name: str) -> Any:
    """A schema that this property satisfies. One pattern is enough for a proof, but it would have to be matched."""
    if name in schema.get("properties", ()):
        return schema["properties"][name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)
