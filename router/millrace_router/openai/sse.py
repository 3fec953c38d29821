"""Server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec


def event(value: Any, name: str = "") -> bytes:
    """An event with a JSON value, and a name if it has one."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(value) + b"\n\n"
