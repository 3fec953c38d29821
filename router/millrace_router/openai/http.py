"""The OpenAI API over HTTP, with health, readiness and metrics beside it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping

from fastapi import FastAPI, Request, Response
from millrace_common.log import request_id

from millrace_router.edge import probes
from millrace_router.edge.http_answers import json_answer, new_app, read_body
from millrace_router.flow.inference import Answer, Inference
from millrace_router.openai import openapi
from millrace_router.openai.answers import Shape
from millrace_router.openai.chat import ChatRequest
from millrace_router.openai.responses import ResponseForm
from millrace_router.openai.responses_request import ResponsesRequest
from millrace_router.openai.serving import read, serve, serve_translated
from millrace_router.openai.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from millrace_router.openai.types import CompletionRequest, parse


def build(inference: Inference, before_scrape: Callable[[], None] | None, more: Mapping[str, openapi.Post]) -> FastAPI:
    """`more`: as for `openapi.document`."""
    app, document = new_app(), openapi.document(more)
    app.openapi = lambda: document  # type: ignore[method-assign]
    most, started = inference.backend.config.limits.message_bytes, int(time.time())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _generate(inference, request, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _generate(inference, request, CompletionRequest)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        wanted = await read(inference, request, ResponsesRequest)
        return await serve_translated(inference, request, wanted, functools.partial(ResponseForm, wanted))

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

    return probes.add(app, inference.backend, before_scrape)


async def _generate(
    inference: Inference, request: Request, kind: type[ChatRequest] | type[CompletionRequest]
) -> Response:
    wanted = await read(inference, request, kind)
    ask = wanted.ask(request_id.get())
    chat, logprobs = isinstance(wanted, ChatRequest), "logprobs" in ask.numbers
    tools = isinstance(wanted, ChatRequest) and wanted.may_call

    def shape(answer: Answer) -> Shape:
        options = wanted.stream_options
        usage = options.include_usage, options.include_usage and options.continuous_usage_stats
        return Shape(chat, answer, inference.tokenizer, logprobs, tools, *usage)

    return await serve(inference, request, ask, shape, wanted.stream)
