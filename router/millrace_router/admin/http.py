"""The Admin service over HTTP, on a port of its own: JSON of the same messages, answered by the same functions.

A body may be left out. Its fields are those of the message, and an unknown one is an error. Pages of other sites are
refused (browser_guard.py); the port has one of its own (page.py).
"""

from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec
from google.protobuf import json_format
from google.protobuf.message import Message
from millrace.v1 import admin_pb2 as pb
from millrace_common.quoted import cut
from millrace_common.reasons import Reason
from millrace_rpc.access import HEADER, Access
from millrace_rpc.errors import MillraceError
from millrace_rpc.http_connection import NAMES
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from millrace_router.admin import browser_guard, page
from millrace_router.admin.service import SERVICE, Admin
from millrace_router.http.answers import json_answer, new_app, on_error, read_body
from millrace_router.http.guard import OPEN_PATHS
from millrace_router.http.probes import health

MAX_BODY = 64 << 10
Method = Callable[[Any], Awaitable[Message]]  # of Admin, each with a message of its own


def build(admin: Admin, public: page.PublicHttp, names: Collection[str] = ()) -> Starlette:
    """`names`: of this host, in small letters, by which the port is asked; addresses need none."""
    routes: tuple[tuple[str, str, Method, type[Message]], ...] = (
        ("GET", "/workers", admin.ListWorkers, pb.ListWorkersRequest),
        ("GET", "/explain/{request_id:path}", admin.ExplainRequest, pb.ExplainRequestRequest),
        ("POST", "/drain/{address:path}", admin.DrainWorker, pb.DrainWorkerRequest),
        ("POST", "/warmup", admin.WarmUp, pb.WarmUpRequest),
        ("POST", "/freeze_gc", admin.FreezeGcAll, pb.FreezeGcAllRequest),
        ("POST", "/flush_cache", admin.FlushCaches, pb.FlushCachesRequest),
        ("POST", "/start_profile", admin.StartProfiles, pb.StartProfilesRequest),
        ("POST", "/stop_profile", admin.StopProfiles, pb.StopProfilesRequest),
    )
    found = [Route(path, _endpoint(method, message, names), methods=[verb]) for verb, path, method, message in routes]
    return new_app([Route("/health", health), *found, *page.routes(names, public)])


def _endpoint(method: Method, kind: type[Message], names: Collection[str]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        """Fill the message from the body and the path's parameters, which have the names of its fields."""
        browser_guard.check(request.method, request.headers, names)
        body, message = await read_body(request, MAX_BODY), kind()
        try:
            json_format.ParseDict(msgspec.json.decode(body or b"{}", type=dict), message)
        except (json_format.ParseError, ValueError, RecursionError) as error:  # ValueError: not JSON, or not UTF-8
            text = f"the body is not a {message.DESCRIPTOR.name} in JSON: {cut(error)}"
            raise MillraceError(Reason.INVALID_ARGUMENT, text) from error
        for name, value in request.path_params.items():
            setattr(message, name, value)
        answer = json_format.MessageToDict(
            await method(message), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        return json_answer(answer)

    return endpoint


class AdminGuard:
    """ASGI middleware of the operators' port: its caller is known as that of the same service over gRPC."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                names, sent = scope.get(NAMES, ()), Request(scope).headers.get(HEADER, "")
                self._access.check(f"/{SERVICE}", names, sent)
            except MillraceError as error:
                await (await on_error(Request(scope), error))(scope, receive, send)
                return
        await self._app(scope, receive, send)
