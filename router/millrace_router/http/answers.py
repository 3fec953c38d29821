"""HTTP: bounded bodies, answers and events in JSON, and errors in the shape of the API, from the one table."""

import asyncio
import math
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote, unquote

import msgspec
from millrace_common.json_values import Json, JsonObject
from millrace_common.log import request_id
from millrace_common.quoted import cut
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError
from millrace_rpc.http_connection import body_of
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from millrace_router.config import BodyLimits
from millrace_router.flow.stream import gone
from millrace_router.flow.validate import check_size
from millrace_router.queue.tenant import caller

MESSAGES = "/v1/messages"  # the paths of the Anthropic API begin so
COMMENT = b": keep-alive\n\n"  # of server-sent events, which clients skip
GRACE_S = 10.0  # before a body has to come at its least rate
BYTES_PER_S = 4096  # that rate
PACE = BodyLimits()
LINE_BREAKS = re.compile("\x85|\u2028|\u2029".encode())  # of Unicode: JSON may have them as they are
SIZE = "millrace.body_size"  # a scope's, once the body was read
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
GZIP, ZLIB, RAW = 31, 15, -15  # what zlib calls window bits. RAW: some clients send deflate without zlib's header
CODINGS = ("gzip", "deflate")


def new_app(routes: Sequence[BaseRoute]) -> Starlette:
    """An app in which every exception gets an answer in this shape; uvicorn also logs the unexpected ones."""
    kinds = (MillraceError, HTTPException, Exception)
    app = Starlette(routes=routes, middleware=[Middleware(Tidy)], exception_handlers=dict.fromkeys(kinds, on_error))
    app.router.redirect_slashes = False
    return app


class Tidy:
    """ASGI middleware: a path may have further slashes, within it and at its end. One that is data is written %2F."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(tidy(scope), receive, send)


def tidy(scope: Scope) -> Scope:
    path = scope["path"]
    if "//" not in path and (not path.endswith("/") or path == "/"):
        return scope
    raw = scope.get("raw_path") or quote(path).encode()
    return {**scope, "path": "/" + "/".join(map(unquote, filter(None, raw.decode("latin-1").split("/"))))}


def json_answer(value: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, {**(headers or {}), **names()}, "application/json")


def event(value: Json, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + one_line(value) + b"\n\n"


def one_line(value: Json) -> bytes:
    """As JSON, with the line breaks of Unicode escaped.

    Server-sent events end no line at them. Clients do that read lines of text (httpx's `iter_lines`, `str.splitlines`).
    """
    data = msgspec.json.encode(value)
    return data if data.isascii() else LINE_BREAKS.sub(_escaped, data)


def _escaped(found: re.Match[bytes]) -> bytes:
    return f"\\u{ord(found[0].decode()):04x}".encode()


async def on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # an unknown path or method
        if request.method == "OPTIONS" and error.status_code == 405:
            return Response(None, 204, error.headers)
        reason = Reason.METHOD_NOT_ALLOWED if error.status_code == 405 else Reason.NOT_FOUND
        unknown = MillraceError(reason, f"{request.method} {cut(request.url.path)}: {error.detail}")
        return json_answer(_body(request, unknown), unknown.row.http, error.headers)
    error = MillraceError.of(error)
    if request.method == "POST":
        caller.get().tenant.refused(error, request.scope.get(SIZE, 0), time.monotonic())
    headers = {"retry-after": str(math.ceil(error.retry_after_s))} if error.retry_after_s > 0 else {}
    if error.reason is Reason.UNSUPPORTED_ENCODING:
        headers["accept-encoding"] = ", ".join(CODINGS)
    return json_answer(_body(request, error), error.row.http, headers)


def names() -> dict[str, str]:
    """The headers by which the clients of OpenAI and of Anthropic tell which request it is."""
    name = request_id.get()
    return {"x-request-id": name, "request-id": name} if name else {}


def anthropic_error(error: MillraceError) -> JsonObject:
    facts: JsonObject = {"type": ANTHROPIC_TYPES.get(error.row.http, "invalid_request_error")}
    facts["message"] = error.message
    if error.param == "thread":  # Anthropic's tool runner asks for one first, and goes on without when it reads this
        facts["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": facts, "request_id": request_id.get() or None}


def _body(request: Request, error: MillraceError) -> JsonObject:
    return anthropic_error(error) if request.url.path.startswith(MESSAGES) else error.http_body()


async def read_body(
    request: Request, most: int, pace: BodyLimits = PACE, take: Callable[[int], None] = lambda count: None
) -> bytes:
    """Return the body, decoded. `take` gets the bytes as they come, and may raise. The rest of a body that is refused
    is not read: its answer is the last one of the connection.
    """
    body, loop = bytearray(), asyncio.get_running_loop()

    async def receive(progress: Callable[[], None] = lambda: None) -> None:
        async for piece in request.stream():
            if piece:
                check_size(len(body) + len(piece), most)
                take(len(piece))
                body.extend(piece)
                progress()

    if received(request):
        await receive()
    else:
        begun = loop.time()
        check_size(int(request.headers.get("content-length", 0)), most)
        try:
            async with asyncio.timeout_at(body_deadline(begun, 0, pace)) as limit:
                await receive(lambda: limit.reschedule(body_deadline(begun, len(body), pace)))
        except TimeoutError:
            text = f"the body was not complete after {pace.timeout:g} s, or came slower than {BYTES_PER_S} bytes/s"
            raise MillraceError(Reason.DEADLINE_EXCEEDED, text) from None
        except ClientDisconnect as error:
            raise gone() from error
    data = bytes(body)
    if encoding := request.headers.get("content-encoding", ""):
        data = await asyncio.to_thread(decoded, data, encoding, most)
        take(max(0, len(data) - len(body)))
    request.scope[SIZE] = len(data)
    return data


def received(request: Request) -> bool:
    """Whether the body is there, and only has to be taken."""
    line = body_of(request.scope)
    return line is not None and line.received()


def body_deadline(begun: float, size: int, pace: BodyLimits) -> float:
    """Until when more has to come of a body of which `size` bytes are there."""
    return begun + min(pace.timeout, GRACE_S + size / BYTES_PER_S)


def decoded(body: bytes, content_encoding: str, most: int) -> bytes:
    """Return the body as it was before the encoding that the header names. No more than `most` bytes are decoded.

    Raises UNSUPPORTED_ENCODING, MESSAGE_TOO_LARGE, and INVALID_ARGUMENT for a body that is not what the header says.
    """
    named = [name.strip().lower() for name in content_encoding.split(",")]
    codings = [name.removeprefix("x-") for name in named if name not in ("", "identity")]
    if not codings:
        return body
    if len(codings) > 1 or codings[0] not in CODINGS:
        message = f"the body's content-encoding {cut(', '.join(codings))} is not supported; use {' or '.join(CODINGS)}"
        raise MillraceError(Reason.UNSUPPORTED_ENCODING, message)
    stream = zlib.decompressobj(_window(body, codings[0]))
    try:
        text = stream.decompress(body, most + 1)
    except zlib.error as error:
        raise MillraceError(Reason.INVALID_ARGUMENT, f"the body is not valid {codings[0]}: {error}") from error
    if len(text) > most:
        raise MillraceError(Reason.MESSAGE_TOO_LARGE, f"the decoded body has more than {most} bytes, the limit")
    if not stream.eof or stream.unused_data:
        where = "goes on after" if stream.eof else "ends before"
        raise MillraceError(
            Reason.INVALID_ARGUMENT, f"the body is not valid {codings[0]}: it {where} the end of its data"
        )
    return text


def _window(body: bytes, coding: str) -> int:
    if coding == "gzip":
        return GZIP
    return ZLIB if body[:1] and body[0] & 15 == zlib.DEFLATED and int.from_bytes(body[:2]) % 31 == 0 else RAW
