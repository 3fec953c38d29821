"""HTTP: bounded bodies, answers in JSON, and errors in the shape of the OpenAI API, from the one table."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from millrace_common.log import request_id
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from millrace_router.flow.stream import gone
from millrace_router.flow.validate import check_size


def new_app(**options: Any) -> FastAPI:
    """An app in which every exception gets an answer in this shape; uvicorn also logs the unexpected ones."""
    app = FastAPI(docs_url=None, redoc_url=None, **options)
    app.add_exception_handler(MillraceError, on_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ClientDisconnect, on_gone)
    app.add_exception_handler(Exception, on_fault)
    return app


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MillraceError)
    headers = {"retry-after": str(math.ceil(error.retry_after_s))} if error.retry_after_s > 0 else {}
    if name := request_id.get():
        headers["x-request-id"] = name
    return json_answer(error.http_body(), error.row.http, headers)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the same shape."""
    assert isinstance(error, HTTPException)
    body = MillraceError(Reason.NOT_FOUND, f"{request.method} {request.url.path}: {error.detail}").http_body()
    return json_answer(body, error.status_code, dict(error.headers or {}))


async def on_gone(request: Request, error: Exception) -> Response:
    """The client has gone: the answer is not read, and the router has no fault."""
    return await on_error(request, gone())


async def on_fault(request: Request, error: Exception) -> Response:
    return await on_error(request, MillraceError(Reason.INTERNAL, f"{type(error).__name__}: {error}"))


async def read_body(request: Request, most: int) -> bytes:
    """Return the body. Too large a body is read to its end, as clients expect, but not kept."""
    body, size = bytearray(), 0
    async for piece in request.stream():
        size += len(piece)
        if size <= most:
            body += piece
    check_size(size, most)
    return bytes(body)
