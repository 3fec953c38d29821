"""millrace.v1.Inference over gRPC: messages to an `Ask`, deltas to messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Proto
from millrace.v1 import inference_pb2 as pb
from millrace_common.log import request_id
from millrace_common.reasons import Reason
from millrace_common.sampling_limits import NUMBERS
from millrace_rpc.errors import MillraceError

from millrace_router.flow import validate
from millrace_router.flow.ask import Ask, Chat, Message, Prompt
from millrace_router.flow.inference import Inference
from millrace_router.flow.stream import Delta, gone

SERVICE = "millrace.v1.Inference"


class InferenceService:
    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        request_id.set(request.request_id)
        answer = await self._inference.generate(to_ask(request, context.time_remaining()), "grpc")
        context.add_done_callback(lambda _: answer.stream.close(gone()))
        async for delta in answer.stream.deltas():
            yield _response(delta, answer.request_id, answer.model, answer.prompt_tokens)

    async def tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        model, prompt = self._inference.model, _prompt(request.prompt)
        validate.check_model(request.model, self._inference.names)
        validate.check_prompt(prompt, model)
        return pb.TokenizeResponse(token_ids=await self._inference.tokenize(prompt, model))

    async def detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        model = self._inference.model
        validate.check_model(request.model, self._inference.names)
        validate.check_ids("token_ids", request.token_ids, model)
        text = self._inference.tokenizer.decode(request.token_ids, request.keep_special_tokens)
        return pb.DetokenizeResponse(text=text)

    async def list_models(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        model = self._inference.model
        entries = [
            pb.Model(name=name, max_context=model.max_context, vocab_size=model.vocab_size)
            for name in self._inference.names
        ]
        return pb.ListModelsResponse(models=entries)

    def handlers(self) -> grpc.GenericRpcHandler:
        """The handlers for the server. The generated registration would answer malformed bytes with INTERNAL."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        methods = {
            "Generate": self._handler(stream, self.generate, pb.GenerateRequest, streaming=True),
            "Tokenize": self._handler(unary, self.tokenize, pb.TokenizeRequest),
            "Detokenize": self._handler(unary, self.detokenize, pb.DetokenizeRequest),
            "ListModels": self._handler(unary, self.list_models, pb.ListModelsRequest),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _handler(self, make: Callable, behavior: Callable, message: type[Proto], streaming: bool = False) -> Any:
        limits = self._inference.backend.config.limits

        def parse(data: bytes) -> Proto | MillraceError:
            try:
                validate.check_size(len(data), limits)
                return message.FromString(data)
            except DecodeError:
                text = f"the request is not a well-formed {message.__name__} (strings must be valid UTF-8)"
                return MillraceError(Reason.INVALID_ARGUMENT, text)
            except MillraceError as error:
                return error

        return make(_checked_stream(behavior) if streaming else _checked(behavior), parse, _serialize)


def _serialize(message: Proto) -> bytes:
    return message.SerializeToString()


def _checked(behavior: Callable) -> Callable:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if isinstance(request, MillraceError):
            raise request
        return await behavior(request, context)

    return call


def _checked_stream(behavior: Callable) -> Callable:
    def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        return _refusal(request) if isinstance(request, MillraceError) else behavior(request, context)

    return call


async def _refusal(error: MillraceError) -> AsyncIterator[Any]:
    raise error
    yield  # makes this a generator


def to_ask(request: pb.GenerateRequest, timeout_s: float | None) -> Ask:
    sampling = request.sampling
    return Ask(
        model=request.model,
        prompt=_prompt(request.prompt),
        numbers={name: getattr(sampling, name) for name in NUMBERS if sampling.HasField(name)},
        logit_bias=dict(sampling.logit_bias),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        grammar=sampling.grammar if sampling.HasField("grammar") else None,
        stop=list(request.stop),
        n=request.n if request.HasField("n") else 1,
        priority=request.priority,
        request_id=request.request_id,
        session_id=request.session_id,
        keep_special_tokens=request.keep_special_tokens,
        timeout_s=timeout_s,
    )


def _prompt(prompt: pb.Prompt) -> Prompt | None:
    match prompt.WhichOneof("prompt"):
        case "text":
            return prompt.text
        case "chat":
            return Chat(tuple(Message(message.role, message.content) for message in prompt.chat.messages))
        case "token_ids":
            return list(prompt.token_ids.ids)
    return None


def _response(delta: Delta, request_id: str, model: str, prompt_tokens: int) -> pb.GenerateResponse:
    """One for every token: assignments take half as long as keyword arguments."""
    response = pb.GenerateResponse()
    response.request_id = request_id
    response.index = delta.index
    response.text = delta.text
    response.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        response.logprobs.extend(delta.logprobs)
    response.finish_reason = delta.finish_reason
    usage = response.usage
    usage.prompt_tokens = prompt_tokens
    usage.cached_prompt_tokens = delta.cached_tokens
    usage.completion_tokens = delta.completion_tokens
    if delta.first:
        response.model = model
    return response
