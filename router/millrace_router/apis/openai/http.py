"""The OpenAI API over HTTP."""

import functools
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace_router.apis.openai.answers import AnswerShape
from millrace_router.apis.openai.chat import ChatRequest
from millrace_router.apis.openai.objects import ModelObject, Text, Tokens
from millrace_router.apis.openai.responses import ResponseForm
from millrace_router.apis.openai.responses_request import ResponsesRequest
from millrace_router.apis.openai.tokens import DetokenizeRequest, TokenizeRequest
from millrace_router.apis.openai.types import CompletionRequest
from millrace_router.apis.serving import read, read_ask, serve, serve_blocks
from millrace_router.flow.inference import Answer, Inference
from millrace_router.flow.validate import check_model
from millrace_router.http.answers import json_answer


def routes(inference: Inference) -> list[Route]:
    started = int(time.time())

    async def responses(request: Request) -> Response:
        return await serve_blocks(inference, request, ResponsesRequest, ResponseForm)

    def described(name: str) -> ModelObject:
        longest = inference.model.max_context
        return ModelObject(id=name, object="model", created=started, owned_by="millrace", max_model_len=longest)

    async def models(request: Request) -> Response:
        return json_answer({"object": "list", "data": [described(name) for name in inference.names]})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        check_model(name, inference.names)
        return json_answer(described(name))

    async def to_tokens(request: Request) -> Response:
        _, ask = await read_ask(inference, request, TokenizeRequest)
        tokens = await inference.prompt_tokens(ask)
        return json_answer(Tokens(count=len(tokens), max_model_len=inference.model.max_context, tokens=tokens))

    async def to_text(request: Request) -> Response:
        wanted, *_ = await read(inference, request, DetokenizeRequest, lambda wanted: None)
        text = await inference.text_of(wanted.model, "tokens", wanted.tokens, wanted.keep_special_tokens)
        return json_answer(Text(prompt=text))

    return [
        Route("/v1/chat/completions", functools.partial(_generate, inference, ChatRequest), methods=["POST"]),
        Route("/v1/completions", functools.partial(_generate, inference, CompletionRequest), methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", model),  # names may have slashes
        Route("/tokenize", to_tokens, methods=["POST"]),
        Route("/detokenize", to_text, methods=["POST"]),
    ]


async def _generate(
    inference: Inference, kind: type[ChatRequest] | type[CompletionRequest], request: Request
) -> Response:
    with inference.counting("http"):
        wanted, ask = await read_ask(inference, request, kind)
    chat, logprobs = isinstance(wanted, ChatRequest), "logprobs" in ask.numbers

    def shape(answer: Answer) -> AnswerShape:
        options = wanted.stream_options
        usage = options.include_usage, options.include_usage and options.continuous_usage_stats
        special = wanted.keep_special_tokens
        return AnswerShape(chat, answer, inference.tokenizer, logprobs, special, *usage)

    return await serve(inference, request, ask, shape, wanted.stream)
