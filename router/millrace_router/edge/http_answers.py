"""HTTP: bounded bodies, answers and events in JSON, and errors in the shape of the API, from the one table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from millrace_common.log import request_id
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from millrace_router.flow.stream import gone
from millrace_router.flow.validate import check_size

MESSAGES = "/v1/messages"  # the paths of the Anthropic API begin so
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def new_app(routes: Sequence[BaseRoute]) -> Starlette:
    """An app in which every exception gets an answer in this shape; uvicorn also logs the unexpected ones."""
    kinds = (MillraceError, HTTPException, ClientDisconnect, Exception)
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, on_error))


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def event(value: Any, name: str = "") -> bytes:
    """A server-sent event with a JSON value, and a name if it has one."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(value) + b"\n\n"


async def on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # an unknown path or method
        unknown = MillraceError(Reason.NOT_FOUND, f"{request.method} {request.url.path}: {error.detail}")
        return json_answer(_body(request, unknown), error.status_code, dict(error.headers or {}))
    if isinstance(error, ClientDisconnect):  # the answer is not read, and the router has no fault
        error = gone()
    elif not isinstance(error, MillraceError):
        error = MillraceError.unexpected(error)
    headers = {"retry-after": str(math.ceil(error.retry_after_s))} if error.retry_after_s > 0 else {}
    if name := request_id.get():
        headers |= named(name)
    return json_answer(_body(request, error), error.row.http, headers)


def named(name: str) -> dict[str, str]:
    """The headers by which the clients of OpenAI and of Anthropic tell which request it was."""
    return {"x-request-id": name, "request-id": name}


def anthropic_error(error: MillraceError) -> dict[str, Any]:
    facts: dict[str, Any] = {"type": ANTHROPIC_TYPES.get(error.row.http, "invalid_request_error")}
    facts["message"] = error.message
    if error.param == "thread":  # Anthropic's tool runner asks for one first, and goes on without when it reads this
        facts["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": facts, "request_id": request_id.get() or None}


def _body(request: Request, error: MillraceError) -> dict[str, Any]:
    return anthropic_error(error) if request.url.path.startswith(MESSAGES) else error.http_body()


async def read_body(request: Request, most: int) -> bytes:
    """Return the body. Too large a body is read to its end, as clients expect, but not kept."""
    body, size = bytearray(), 0
    async for piece in request.stream():
        size += len(piece)
        if size <= most:
            body += piece
    check_size(size, most)
    return bytes(body)
