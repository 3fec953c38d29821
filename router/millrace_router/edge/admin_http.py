"""The Admin service over HTTP, on a port of its own: JSON of the same messages, answered by the same functions.

    GET  /workers                                       the states of workers; pairs; this process
    GET  /explain/{request_id}                          why it was sent where it was
    POST /drain/{worker}      {"timeout_s": 30}
    POST /warmup  /freeze_gc  /flush_cache
    POST /start_profile       {"workers": [], "max_seconds": 10}
    POST /stop_profile        {"workers": []}
    GET  /health

A body may be left out. Its fields are those of the message, and an unknown one is an error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from google.protobuf import json_format
from google.protobuf.message import Message
from millrace.v1 import admin_pb2 as pb
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_router.edge.admin import Admin
from millrace_router.edge.http_answers import json_answer, new_app

MAX_BODY = 64 << 10
Method = Callable[[Any], Awaitable[Message]]  # of Admin, each with a message of its own


def build(admin: Admin) -> FastAPI:
    app = new_app(title="Millrace admin")

    @app.get("/health")
    async def health() -> Response:
        return json_answer({"status": "ok"})

    @app.get("/workers")
    async def workers() -> Response:
        return _answer(await admin.ListWorkers(pb.ListWorkersRequest()))

    @app.get("/explain/{request_id:path}")
    async def explain(request_id: str) -> Response:
        return _answer(await admin.ExplainRequest(pb.ExplainRequestRequest(request_id=request_id)))

    @app.post("/drain/{worker:path}")
    async def drain(worker: str, request: Request) -> Response:
        return await _call(admin.DrainWorker, request, pb.DrainWorkerRequest(), address=worker)

    posts: dict[str, tuple[Method, type[Message]]] = {
        "/warmup": (admin.WarmUp, pb.WarmUpRequest),
        "/freeze_gc": (admin.FreezeGcAll, pb.FreezeGcAllRequest),
        "/flush_cache": (admin.FlushCaches, pb.FlushCachesRequest),
        "/start_profile": (admin.StartProfiles, pb.StartProfilesRequest),
        "/stop_profile": (admin.StopProfiles, pb.StopProfilesRequest),
    }
    for path, (method, message) in posts.items():
        app.post(path)(_endpoint(method, message))
    return app


def _endpoint(method: Method, message: type[Message]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await _call(method, request, message())

    return endpoint


async def _call(method: Method, request: Request, message: Message, **fields: str) -> Response:
    body = await _body(request)
    try:
        json_format.ParseDict(msgspec.json.decode(body or b"{}", type=dict), message)
    except (json_format.ParseError, ValueError, RecursionError) as error:  # ValueError: not JSON, or not UTF-8
        text = f"the body is not a {message.DESCRIPTOR.name} in JSON: {error}"
        raise MillraceError(Reason.INVALID_ARGUMENT, text) from error
    for name, value in fields.items():
        setattr(message, name, value)
    return _answer(await method(message))


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise MillraceError(Reason.MESSAGE_TOO_LARGE, f"the body is larger than {MAX_BODY} bytes")
    return bytes(body)


def _answer(message: Message) -> Response:
    return json_answer(
        json_format.MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    )
