"""The Messages API over HTTP, and its answers as the OpenAPI document describes them."""

from typing import Literal, NotRequired, TypedDict

from millrace_common.json_values import JsonObject
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace_router.apis.anthropic.answers import MessageForm
from millrace_router.apis.anthropic.types import CountRequest, MessagesRequest
from millrace_router.apis.openai.objects import NamedEvent
from millrace_router.apis.openapi import Post
from millrace_router.apis.reading import Reading
from millrace_router.apis.serving import named, read_ask, serve_blocks
from millrace_router.flow.inference import Answer, Inference
from millrace_router.http.answers import json_answer


class Message(TypedDict):
    """As Anthropic describes it, and `system_fingerprint` and `ignored` as of chat. `content`: blocks of type thinking,
    text and tool_use.
    """

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    system_fingerprint: str | None
    ignored: NotRequired[dict[str, str]]
    content: list[JsonObject]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: JsonObject


class MessageTokens(TypedDict):
    input_tokens: int


class MessageErrorFacts(TypedDict):
    """`details`: of a refused `thread`."""

    type: str
    message: str
    details: NotRequired[JsonObject]


class MessageError(TypedDict):
    type: Literal["error"]
    error: MessageErrorFacts
    request_id: str | None


POSTS = {
    "/v1/messages": Post("Answer a conversation", MessagesRequest, Message, NamedEvent, MessageError),
    "/v1/messages/count_tokens": Post("Length of a prompt", CountRequest, MessageTokens, error=MessageError),
}


def routes(inference: Inference) -> list[Route]:
    async def messages(request: Request) -> Response:
        def form(wanted: MessagesRequest, answer: Answer, reading: Reading) -> MessageForm:
            return MessageForm(answer, reading, wanted.shows_reasoning)

        return await serve_blocks(inference, request, MessagesRequest, form)

    async def count_tokens(request: Request) -> Response:
        _, ask = await read_ask(inference, request, CountRequest)
        with named(ask.origins):
            return json_answer({"input_tokens": len(await inference.prompt_tokens(ask))})

    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]
