"""A request of any of the HTTP APIs, from its body to the last event of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from millrace_common.log import request_id
from millrace_rpc.errors import MillraceError
from millrace_rpc.http_server import Body, body_of
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millrace_router.edge.http_answers import json_answer, named, read_body
from millrace_router.flow.ask import Ask
from millrace_router.flow.inference import Answer, Inference
from millrace_router.flow.stream import Delta, Stream, gone
from millrace_router.openai.chat import in_format
from millrace_router.openai.reading import Reading
from millrace_router.openai.translated import Translated
from millrace_router.openai.types import Strict, parse

R = TypeVar("R", bound=Strict)


class Form(Protocol):
    """How an API tells an answer: at once, or as server-sent events."""

    def whole(self, deltas: Sequence[Delta]) -> Any:
        """The JSON value of a finished answer."""

    def push(self, delta: Delta) -> bytes:
        """The events of a delta; those of the first begin the stream."""

    def end(self) -> bytes: ...

    def fail(self, error: MillraceError) -> bytes:
        """The last events of a stream that ends early."""


async def read(inference: Inference, request: Request, kind: type[R]) -> R:
    """The request in the body. From here on its id is in logs and answers."""
    request_id.set(request.headers.get("x-request-id", "") or secrets.token_hex(12))
    return parse(kind, await read_body(request, inference.backend.config.limits.message_bytes))


async def serve(
    inference: Inference, request: Request, ask: Ask, form_of: Callable[[Answer], Form], stream: bool
) -> Response:
    ask = in_format(ask, inference.tokenizer.format)
    if session_id := request.headers.get("x-session-id", ""):
        ask = replace(ask, session_id=session_id)
    answer = await inference.generate(ask, "http")
    form, headers = form_of(answer), named(answer.request_id)
    watcher = asyncio.create_task(_watch(request, answer.stream))
    with contextlib.ExitStack() as ends:
        ends.callback(watcher.cancel)
        ends.callback(answer.stream.close, gone())
        if not stream:
            return json_answer(form.whole([delta async for delta in answer.stream.deltas()]), headers=headers)
        events = _events(form, answer.stream)
        first = await anext(events)  # a failure before it is an HTTP status, not an event of a stream with status 200
        if (body := body_of(request.scope)) is not None:
            answer.stream.sink = _Direct(body, form)
        return _Sse(first, events, headers, ends.pop_all())


async def serve_translated(
    inference: Inference, request: Request, wanted: Translated, form_of: Callable[[Answer, Reading], Form]
) -> Response:
    chat = wanted.as_chat()

    def form(answer: Answer) -> Form:
        return form_of(answer, Reading(answer, inference.tokenizer))

    with wanted.named():
        return await serve(inference, request, chat.ask(request_id.get(), wanted.ignored), form, wanted.stream)


async def _watch(request: Request, stream: Stream) -> None:
    """Cancel the stream when the client goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stream.cancel(gone())


async def _events(form: Form, stream: Stream) -> AsyncIterator[bytes]:
    begun = False
    try:
        async for delta in stream.deltas():
            yield form.push(delta)
            begun = True
    except MillraceError as error:
        if not begun:
            raise
        yield form.fail(error)
        return
    yield form.end()


class _Direct:
    """The sink of a stream whose head is sent."""

    def __init__(self, body: Body, form: Form) -> None:
        self._body = body
        self._form = form

    @property
    def ready(self) -> bool:
        return self._body.ready

    def push(self, delta: Delta) -> None:
        self._body.write(self._form.push(delta))


class _Sse(Response):
    """Does what `ends` holds, whatever happens to the connection."""

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, rest: AsyncIterator[bytes], headers: dict[str, str], ends: contextlib.ExitStack
    ) -> None:
        self._first, self._rest, self._ends = first, rest, ends
        self.init_headers(headers | {"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._ends:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in self._rest:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
