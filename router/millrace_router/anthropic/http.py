"""The Messages API over HTTP, beside the OpenAI API."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from millrace_common.log import request_id

from millrace_router.anthropic import objects
from millrace_router.anthropic.answers import MessageForm
from millrace_router.anthropic.types import CountRequest, MessagesRequest
from millrace_router.edge.http_answers import json_answer
from millrace_router.flow.inference import Answer, Inference
from millrace_router.openai import http as openai_http
from millrace_router.openai.objects import NamedEvent
from millrace_router.openai.openapi import Post
from millrace_router.openai.reading import Reading
from millrace_router.openai.serving import read, serve_translated
from millrace_router.openai.tokens import prompt_tokens

POSTS = {
    "/v1/messages": Post("Answer a conversation", MessagesRequest, objects.Message, NamedEvent, objects.MessageError),
    "/v1/messages/count_tokens": Post(
        "Length of a prompt", CountRequest, objects.MessageTokens, error=objects.MessageError
    ),
}


def build(inference: Inference, before_scrape: Callable[[], None] | None) -> FastAPI:
    app = openai_http.build(inference, before_scrape, POSTS)

    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        wanted = await read(inference, request, MessagesRequest)

        def form(answer: Answer, reading: Reading) -> MessageForm:
            return MessageForm(answer, reading, wanted.stop_sequences, wanted.shows_thoughts)

        return await serve_translated(inference, request, wanted, form)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        wanted = await read(inference, request, CountRequest)
        with wanted.named():
            ask = wanted.as_chat().ask(request_id.get())
            return json_answer({"input_tokens": len(await prompt_tokens(inference, ask))})

    return app
