"""Authentication in front of the public ports, and removal of headers that a caller may not set.

Every request is given a `Caller` (queue/tenant.py) from its headers: the tenant of its API key, and its trace. Over
HTTP it is given its id, which logs and the answer have, errors too. Headers `x-millrace-*`, which are internal, are
dropped; the size of all headers is bounded. With API keys configured every call needs one except health, readiness and
reflection.
"""

import secrets
from collections.abc import Iterable, Sequence

import grpc
from millrace_common.log import request_id
from millrace_common.reasons import Reason
from millrace_common.tracing import checked
from millrace_rpc.errors import MillraceError
from millrace_rpc.server import MAX_METADATA_BYTES, Interceptor, preceded
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from millrace_router.flow.validate import MAX_REQUEST_ID_CHARS
from millrace_router.http.answers import on_error, tidy
from millrace_router.http.api_keys import Keys
from millrace_router.queue.tenant import DEFAULT, Caller, caller

OPEN_PATHS = frozenset({"/health", "/ready"})
OURS = b"x-millrace-"
MAX_HEADER_BYTES = MAX_METADATA_BYTES


class GrpcGuard(Interceptor):
    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys

    def wrap(self, handler: grpc.RpcMethodHandler, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return preceded(handler, lambda context: caller.set(_caller(details.invocation_metadata, self._keys)))


class HttpGuard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, keys: Keys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = tidy(scope)
        given = Request(scope).headers.get("x-request-id", "")[: MAX_REQUEST_ID_CHARS + 1]  # too long stays too long
        request_id.set(given or secrets.token_hex(12))
        headers = [(name, value) for name, value in scope["headers"] if not name.startswith(OURS)]
        try:
            if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
                raise MillraceError(Reason.MESSAGE_TOO_LARGE, f"the headers have more than {MAX_HEADER_BYTES} bytes")
            texts = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)
            caller.set(_caller(texts, None if scope["path"] in OPEN_PATHS else self._keys))
        except MillraceError as error:
            answer = await on_error(Request(scope), error)
            if error.reason is Reason.UNAUTHENTICATED:
                answer.headers["www-authenticate"] = "Bearer"
            await answer(scope, receive, send)
            return
        await self._app({**scope, "headers": headers}, receive, send)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Let web pages of these origins read every answer, errors too. Preflights, which have no key, end here."""
    if not origins:
        return app
    read = ("retry-after", "request-id", "x-request-id")
    return CORSMiddleware(app, origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=read)


def _caller(headers: Iterable[tuple[str, str | bytes]], keys: Keys | None) -> Caller:
    """Raises UNAUTHENTICATED."""
    found = {name: value for name, value in headers if isinstance(value, str)}
    key = found.get("x-api-key", "")  # Anthropic's clients send it instead
    tenant = DEFAULT if keys is None else keys.tenant(found.get("authorization", "") or (key and f"Bearer {key}"))
    return Caller(tenant, checked(found.get("traceparent", "")))
