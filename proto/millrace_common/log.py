"""Logging for every process: one line format, with the process's name and, inside a request, the request's id."""

from __future__ import annotations

import contextvars
import logging
import sys

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("millrace_request_id", default="")

LONGEST_ID = 128  # characters of it in a line


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname).1s {process} %(name)s%(request)s: %(message)s", "%H:%M:%S"
        )

    def format(self, record: logging.LogRecord) -> str:
        current = request_id.get()[:LONGEST_ID]
        safe = "".join(c if c.isprintable() else "?" for c in current)  # a client may have chosen it
        record.request = f" [{safe}]" if safe else ""
        return super().format(record)


def setup(process: str, level: str = "INFO") -> None:
    """Log to stderr. `process` is the name in each line, for example "decode/rank0"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "grpc", "httpx", "httpcore", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
