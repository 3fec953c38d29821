"""Tables of the fields of each API in docs/reference/api-*.md, made from the types that parse them."""

import functools
import json
from collections.abc import Iterator
from typing import Any

from millrace_common.sampling_limits import NUMBERS, PRIORITY
from millrace_router.apis import openapi
from millrace_router.apis.anthropic.http import POSTS
from millrace_router.apis.parsing import IGNORED, REFUSED

Schema = dict[str, Any]
Row = tuple[str, str, str, str, str]
HEADER = ("field", "type", "default", "limits", "note")
OTHER_NAMES = {"max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens", "top_logprobs": "logprobs"}
RANGES = NUMBERS | {"priority": PRIORITY}


def api_fields(url: str) -> str:
    """The fields of the request at this path of the HTTP port."""
    request = (openapi.POSTS | POSTS)[url].request
    lines = (HEADER, ("---",) * len(HEADER), *_rows({"$ref": f"/{request.__name__}"}, ""))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace(" --- ", "---")


@functools.cache
def _schemas() -> dict[str, Schema]:
    found: dict[str, Schema] = openapi.document(POSTS)["components"]["schemas"]
    return found


def _branches(schema: Schema) -> list[Schema]:
    """The types that a value may have, without null."""
    if "$ref" in schema:
        return _branches(_schemas()[schema["$ref"].rpartition("/")[2]])
    if several := schema.get("anyOf") or schema.get("oneOf"):
        return [inner for one in several for inner in _branches(one)]
    return [] if schema.get("type") == "null" else [schema]


def _rows(schema: Schema, path: str) -> Iterator[Row]:
    """The rows of the objects that a value may be, or that it has in arrays."""
    several = _branches(schema)
    inner = [one["items"] for one in several if one.get("type") == "array"]
    for items in inner:
        yield from _rows(items, f"{path}[]")
    objects = [one for one in several if "properties" in one]
    for one in objects:
        yield from _object(one, path, f"Of type {_kinds(one)}." if len(objects) > 1 else "")


def _kinds(schema: Schema) -> str:
    """Which of several objects it is: the values of its `type`."""
    return ", ".join(f"`{value}`" for one in _branches(schema["properties"]["type"]) for value in _values(one))


def _object(schema: Schema, path: str, of: str) -> Iterator[Row]:
    ignored = []
    for name, about in schema["properties"].items():
        text, field = " ".join(about.get("description", "").split()), f"{path}.{name}" if path else name
        if text.startswith(IGNORED):
            ignored.append(f"`{name}`")
        elif text.startswith(REFUSED):
            yield f"`{field}`", "", "", "", f"refused: {text.removeprefix(REFUSED).strip()}"
        else:
            default = "required" if name in schema.get("required", ()) else _default(about)
            note = " ".join(part for part in (of if name != "type" else "", text) if part)
            yield f"`{field}`", _type(about), default, _limits(field, about), note
            yield from _rows(about, field)
    if ignored:
        yield f"`{path}`: " * bool(path) + ", ".join(ignored), "", "", "", "ignored"


def _values(schema: Schema) -> list[Any]:
    return [schema["const"]] if "const" in schema else schema.get("enum", [])


def _type(schema: Schema) -> str:
    names: dict[str, None] = {}
    for one in _branches(schema):
        inner = f" of {_type(one['items'])}" if one.get("type") == "array" else ""
        values = ", ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in _values(one))
        names[values or one.get("type", "any") + inner] = None
    return " or ".join(names)


def _default(schema: Schema) -> str:
    value = schema.get("default")
    return f"`{json.dumps(value)}`" if value not in (None, "", [], {}) and not isinstance(value, dict) else ""


def _limits(field: str, schema: Schema) -> str:
    """Of a number, of the length, and of the form."""
    known, several = RANGES.get(OTHER_NAMES.get(field, field)), _branches(schema)
    said = [str(known)] if known and any(one.get("type") in ("number", "integer") for one in several) else []
    for one in several:
        said += [f"`{one['pattern']}`"] if "pattern" in one else []
        said += [f"{one['maxProperties']} entries"] if "maxProperties" in one else []
    return ", ".join(said)
