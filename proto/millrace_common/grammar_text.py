"""Checks of a grammar's text before any compilation. The router checks it early; workers check it again."""

from __future__ import annotations

import json
from typing import Any

REGEX = "regex"  # the kind of grammar that is no JSON
MAX_BYTES = 64 << 10
MAX_DEPTH = 64  # of nested JSON: a compiler's time grows with its cube, and it recurses


def problem(kind: str, text: str) -> str:
    """The fault of the text as the end of a sentence; empty: none found."""
    size = len(text.encode(errors="replace"))
    if not 1 <= size <= MAX_BYTES:
        return f"it has {size} bytes; 1 to {MAX_BYTES} are allowed"
    if kind == REGEX:
        return ""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"it is not valid JSON: {error}"
    if not isinstance(value, dict | bool):
        return "it must be a JSON object"
    return f"it is nested more than {MAX_DEPTH} deep" if deeper_than(value, MAX_DEPTH) else ""


def deeper_than(value: Any, limit: int) -> bool:
    """Whether JSON is nested more than `limit` deep."""
    level = [value]
    for _ in range(limit + 1):
        containers = (
            item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)
        )
        level = [child for container in containers for child in container]
        if not level:
            return False
    return True
