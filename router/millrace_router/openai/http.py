"""The OpenAI API over HTTP, with health, readiness and metrics beside it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from millrace_common.log import request_id
from millrace_rpc.errors import MillraceError
from starlette.types import Receive, Scope, Send

from millrace_router.edge import probes
from millrace_router.edge.http_answers import json_answer, new_app, read_body
from millrace_router.flow.inference import Inference
from millrace_router.flow.stream import Stream, gone
from millrace_router.openai import openapi
from millrace_router.openai.answers import Shape
from millrace_router.openai.chat import ChatRequest, in_format
from millrace_router.openai.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from millrace_router.openai.types import CompletionRequest, parse


def build(inference: Inference, before_scrape: Callable[[], None] | None) -> FastAPI:
    app = new_app(openapi_url=None)
    most = inference.backend.config.limits.message_bytes
    started, document = int(time.time()), openapi.document()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _generate(inference, request, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _generate(inference, request, CompletionRequest)

    @app.get("/v1/models")
    async def models() -> Response:
        facts = {"created": started, "owned_by": "millrace", "max_model_len": inference.model.max_context}
        return json_answer({"object": "list", "data": [{"id": n, "object": "model", **facts} for n in inference.names]})

    @app.post("/tokenize")
    async def to_tokens(request: Request) -> Response:
        return json_answer(await tokenize(inference, parse(TokenizeRequest, await read_body(request, most))))

    @app.post("/detokenize")
    async def to_text(request: Request) -> Response:
        return json_answer(detokenize(inference, parse(DetokenizeRequest, await read_body(request, most))))

    @app.get("/openapi.json")
    async def describe() -> Response:
        return json_answer(document)

    probes.add(app, inference.backend, before_scrape)
    return app


async def _generate(
    inference: Inference, request: Request, kind: type[ChatRequest] | type[CompletionRequest]
) -> Response:
    name = request.headers.get("x-request-id", "") or secrets.token_hex(12)
    request_id.set(name)
    wanted = parse(kind, await read_body(request, inference.backend.config.limits.message_bytes))
    ask = in_format(wanted.ask(name), inference.tokenizer.format)
    if session_id := request.headers.get("x-session-id", ""):
        ask = replace(ask, session_id=session_id)
    answer = await inference.generate(ask, "http")
    chat = isinstance(wanted, ChatRequest)
    tools = isinstance(wanted, ChatRequest) and wanted.may_call
    shape = Shape(chat, answer, inference.tokenizer, "logprobs" in ask.numbers, tools)
    headers = {"x-request-id": answer.request_id}
    if not wanted.stream:
        async with _watched(request, answer.stream):
            deltas = [delta async for delta in answer.stream.deltas()]
        return json_answer(shape.whole(deltas), headers=headers)
    events = _events(shape, wanted.stream_options.include_usage)
    async with _watched(request, answer.stream):
        first = await anext(events)  # a failure before it is an HTTP status, not an event of a stream with status 200
    return _Sse(first, events, answer.stream, headers)


@contextlib.asynccontextmanager
async def _watched(request: Request, stream: Stream) -> AsyncIterator[None]:
    """Cancel the stream if the client goes away meanwhile."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        stream.cancel(gone())

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


async def _events(shape: Shape, include_usage: bool) -> AsyncIterator[bytes]:
    try:
        async for delta in shape.answer.stream.deltas():
            chunk = shape.chunk(delta)
            if include_usage:
                chunk["usage"] = None
            yield _event(chunk)
    except MillraceError as error:
        if not shape.choices:
            raise
        yield _event(error.http_body())
        return
    if include_usage:
        yield _event(shape.usage_chunk())
    yield b"data: [DONE]\n\n"


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class _Sse(StreamingResponse):
    """Closes the stream whatever happens to the connection."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncIterator[bytes], stream: Stream, headers: dict[str, str]) -> None:
        self._stream = stream
        super().__init__(_chain(first, rest), headers=headers | {"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close(gone())


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in rest:
        yield event
