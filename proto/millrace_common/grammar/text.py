"""Checks of a grammar's text before any other work."""

import json

from millrace_common.json_values import Json

JSON_SCHEMA, REGEX, LARK = "json_schema", "regex", "lark"
MAX_BYTES = {JSON_SCHEMA: 64 << 10, REGEX: 4 << 10, LARK: 512 << 10}
MAX_PATTERNS = 4 << 10  # characters, all patterns of a schema together
MAX_DEPTH = 64  # of nested JSON


def problem(kind: str, text: str) -> str:
    """The fault of the text as the end of a sentence; empty: none found."""
    size, most = len(text.encode(errors="replace")), MAX_BYTES[kind]
    if not 1 <= size <= most:
        return f"it has {size} bytes; it must have 1 to {most}"
    if kind != JSON_SCHEMA:
        return ""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"it is not valid JSON: {error}"
    if not isinstance(value, dict | bool):
        return "it must be a JSON object"
    return f"it is nested more than {MAX_DEPTH} deep" if deeper_than(value, MAX_DEPTH) else ""


def deeper_than(value: Json, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        containers = (
            item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)
        )
        level = [child for container in containers for child in container]
        if not level:
            return False
    return True
