"""The parameters of a tool: a JSON schema of an object, because a call's arguments are one."""

import json
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import unquote

from millrace_common.json_values import Json, JsonObject
from pydantic import AfterValidator

MAX_LEVELS = 64  # of parts and references, one in the other: what is deeper stays for the compiler
SHOWN = 80  # characters of a schema in an error


def _of_objects(schema: JsonObject) -> JsonObject:
    """The schema without what it allows besides objects. One that states no type gets it. Raises ValueError when it
    allows no object.
    """
    narrowed = _narrowed(schema, schema, {}, MAX_LEVELS)
    if narrowed is None:
        shown = json.dumps(schema, ensure_ascii=False)
        raise ValueError(f"must be the schema of an object ({{'type': 'object', ...}}), not {shown[:SHOWN]}")
    return narrowed if "type" in narrowed else {"type": "object", **narrowed}


Parameters = Annotated[JsonObject, AfterValidator(_of_objects)]


def _narrowed(schema: Json, root: Mapping[str, Json], allowing: dict[int, bool], levels: int) -> Json:
    """The (sub)schema without what excludes objects; None: it allows none. What is malformed stays for the compiler.
    `allowing`: whether what references point to does, by its id(). Followed each time, a few make a tree of millions.
    """
    if not isinstance(schema, dict) or not levels:
        return None if schema is False else schema
    made = dict(schema)
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if "object" not in types:
            return None
        made["type"] = "object"
    if "const" in schema and not isinstance(schema["const"], dict):
        return None
    if isinstance(values := schema.get("enum"), list):
        made["enum"] = [value for value in values if isinstance(value, dict)]
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(name), list):
            made[name] = [part for each in parts if (part := _narrowed(each, root, allowing, levels - 1)) is not None]
            if name == "allOf" and len(made[name]) < len(parts):
                return None
    if any(made.get(name) == [] for name in ("enum", "anyOf", "oneOf")):
        return None
    target = _target(schema.get("$ref"), root)
    if id(target) not in allowing:
        allowing[id(target)] = True  # in its own parts
        allowing[id(target)] = _narrowed(target, root, allowing, levels - 1) is not None
    return made if allowing[id(target)] else None


def _target(reference: Json, root: Mapping[str, Json]) -> Json:
    """What a local reference points to; else True, a schema that allows everything."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return True
    value: Json = root
    for part in reference[2:].split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        value = value.get(name) if isinstance(value, dict) else None
    return True if value is None else value
