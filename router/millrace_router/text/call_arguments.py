"""Arguments of calls as JSON text: what is an object, what may become one, and what a prompt shows of the rest."""

import json
from typing import NoReturn

import pydantic_core
from millrace_common.grammar.text import MAX_DEPTH, deeper_than
from millrace_common.json_values import Json, JsonObject

NONE = "{}"  # of a call without arguments
INVALID = "INVALID_JSON"  # the name under which arguments that are no object stay readable


def read_json(text: str) -> tuple[bool, Json]:
    """(Whether every client reads `text` as the same JSON value and can send it back, the value). NaN, a name that is
    twice in an object, a lone surrogate, and more than 2 * MAX_DEPTH levels are refused.
    """
    try:
        value = json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False, None
    return not deeper_than(value, 2 * MAX_DEPTH), value


def is_object(text: str) -> bool:
    valid, value = read_json(text)
    return valid and isinstance(value, dict)


def may_become_object(text: str) -> bool:
    """Whether `text` is an object or the beginning of one."""
    if not text or is_object(text):
        return True
    try:
        begun = pydantic_core.from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        return False
    return isinstance(begun, dict) and not _whole(text)


def as_object(text: str) -> JsonObject:
    """Arguments of an earlier call. What was cut off, or is no object, stands whole under one name, by which no tool
    takes it for its own.
    """
    valid, value = read_json(text)
    return value if valid and isinstance(value, dict) else {INVALID: text}


def _whole(text: str) -> bool:
    """Whether a value ends in `text`; text behind it is left."""
    try:
        json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _unique(pairs: list[tuple[str, Json]]) -> JsonObject:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name is used twice")
    return value
