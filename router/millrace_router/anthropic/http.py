"""The public HTTP port: the Messages API, the OpenAI API, and probes beside them."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace_router.anthropic import objects
from millrace_router.anthropic.answers import MessageForm
from millrace_router.anthropic.types import CountRequest, MessagesRequest
from millrace_router.edge import probes
from millrace_router.edge.http_answers import json_answer, new_app
from millrace_router.flow.inference import Answer, Inference
from millrace_router.openai import http as openai_http
from millrace_router.openai import openapi
from millrace_router.openai.objects import NamedEvent
from millrace_router.openai.openapi import Post
from millrace_router.openai.reading import Reading
from millrace_router.openai.serving import named, read_ask, serve_blocks
from millrace_router.openai.tokens import prompt_tokens

POSTS = {
    "/v1/messages": Post("Answer a conversation", MessagesRequest, objects.Message, NamedEvent, objects.MessageError),
    "/v1/messages/count_tokens": Post(
        "Length of a prompt", CountRequest, objects.MessageTokens, error=objects.MessageError
    ),
}


def build(inference: Inference, before_scrape: Callable[[], None] | None) -> Starlette:
    """`before_scrape`: as for `probes.routes`."""
    document = openapi.document(POSTS)

    async def messages(request: Request) -> Response:
        def form(wanted: MessagesRequest, answer: Answer, reading: Reading) -> MessageForm:
            return MessageForm(answer, reading, wanted.shows_thoughts)

        return await serve_blocks(inference, request, MessagesRequest, form)

    async def count_tokens(request: Request) -> Response:
        _, ask = await read_ask(inference, request, CountRequest)
        with named(ask.origins):
            return json_answer({"input_tokens": len(await prompt_tokens(inference, ask))})

    async def described(request: Request) -> Response:
        return json_answer(document)

    own = [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/openapi.json", described),
    ]
    return new_app([*openai_http.routes(inference), *own, *probes.routes(inference.backend, before_scrape)])
