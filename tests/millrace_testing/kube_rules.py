"""What a schema says beyond JSON Schema: defaults, lists that are maps or sets, and CEL rules, old value included.

Both the schemas of built-in kinds and CRDs are walked the same way.
"""

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import cel

Schema = dict[str, Any]
RESERVED = {"true", "false", "null", "in", "as", "break", "const", "continue", "else", "for", "function", "if"} | {
    *("import", "let", "loop", "package", "namespace", "return", "var", "void", "while"),
}
ESCAPES = (("__", "__underscores__"), (".", "__dot__"), ("-", "__dash__"), ("/", "__slash__"))
# What the webhooks of custom resources refuse beyond their CRDs.
WEBHOOKS: dict[tuple[str, str], list[dict[str, str]]] = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): [
        {
            "rule": "!has(self.spec.rolloutStrategy) || !has(self.spec.rolloutStrategy.rollingUpdateConfiguration)"
            " || self.spec.rolloutStrategy.rollingUpdateConfiguration.maxSurge != 0"
            " || self.spec.rolloutStrategy.rollingUpdateConfiguration.maxUnavailable != 0",
            "message": "maxSurge and maxUnavailable are both 0",
        },
        {"rule": "self.spec.leaderWorkerTemplate.size >= 1", "message": "a group has one pod or more"},
    ],
}
DEFAULT_KEYS = {"protocol": "TCP"}  # the one key of a built-in list-map that may be left out


def resolved(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    while "$ref" in schema:
        schema = definitions[schema["$ref"].rsplit("/", 1)[-1]]
    return schema


def child(schema: Schema, name: str) -> Schema:
    """The schema of a field; an empty one where nothing is said."""
    more = schema.get("additionalProperties")
    return schema.get("properties", {}).get(name) or (more if isinstance(more, dict) else {})


def defaulted(schema: Schema, value: Any, definitions: dict[str, Schema]) -> Any:
    """A copy with the defaults of the schema filled in."""
    schema = resolved(schema, definitions)
    if isinstance(value, dict):
        made = dict(value)
        for name, field in schema.get("properties", {}).items():
            if name not in made and "default" in field and field["default"] is not None:
                made[name] = copy.deepcopy(field["default"])
        return {name: defaulted(child(schema, name), each, definitions) for name, each in made.items()}
    if isinstance(value, list):
        return [defaulted(schema.get("items", {}), each, definitions) for each in value]
    return value


def problems(schema: Schema, value: Any, old: Any, definitions: dict[str, Schema], path: str = "") -> Iterator[str]:
    """Broken rules below a value. `old`: the value that it replaces, None for none."""
    schema = resolved(schema, definitions)
    for rule in schema.get("x-kubernetes-validations", ()):
        yield from _broken(rule, schema, value, old, path or "the object")
    if isinstance(value, dict):
        for name, each in value.items():
            before = old.get(name) if isinstance(old, dict) else None
            yield from problems(child(schema, name), each, before, definitions, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        keys = [_key(schema, each) for each in value]
        known = (
            {_key(schema, each): each for each in old or ()} if schema.get("x-kubernetes-list-type") == "map" else {}
        )
        for index, (key, each) in enumerate(zip(keys, value, strict=True)):
            where = f"{path}[{index}]"
            if key is not None and key in keys[:index]:
                yield f"{where}: a second entry with the key {key}"
            yield from problems(schema.get("items", {}), each, known.get(key), definitions, where)


@cache
def program(rule: str) -> Any:
    """ValueError where the rule cannot be compiled."""
    return cel.compile(rule)


def _broken(rule: dict[str, str], schema: Schema, value: Any, old: Any, path: str) -> Iterator[str]:
    """A rule that cannot be evaluated is a broken one."""
    transition = re.search(r"\boldSelf\b", rule["rule"])
    if transition and old is None:
        return
    values = {"self": escaped(schema, value), **({"oldSelf": escaped(schema, old)} if transition else {})}
    try:
        good = program(rule["rule"]).execute(values)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        yield f"{path}: the rule {rule['rule']!r} cannot be evaluated: {error}"
        return
    if good is not True:
        yield f"{path}: {rule.get('message') or rule['rule']}"


def escaped(schema: Schema, value: Any) -> Any:
    """The value with the names of fields as CEL rules of Kubernetes write them; keys of maps stay as they are."""
    if isinstance(value, dict):
        fields = schema.get("properties", {})
        return {
            _escaped(name) if name in fields else name: escaped(child(schema, name), each)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [escaped(schema.get("items", {}), each) for each in value]
    return value


def _escaped(name: str) -> str:
    if name in RESERVED:
        return f"__{name}__"
    for character, escape in ESCAPES:
        name = name.replace(character, escape)
    return name


def _key(schema: Schema, item: Any) -> str | None:
    """What must be unique in the list; None where nothing must."""
    kind = schema.get("x-kubernetes-list-type")
    if kind == "set":
        return json.dumps(item, sort_keys=True)
    if kind == "map":
        return ", ".join(
            f"{key}={item.get(key, DEFAULT_KEYS.get(key))}" for key in schema["x-kubernetes-list-map-keys"]
        )
    return None
