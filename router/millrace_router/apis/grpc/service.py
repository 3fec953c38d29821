"""millrace.v1.Inference over gRPC: messages to an `Ask`, deltas to messages."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from operator import methodcaller
from typing import TypeVar

import grpc
from google.protobuf.message import Message as Proto
from millrace.v1 import inference_pb2 as pb
from millrace_common.log import request_id
from millrace_common.sampling_limits import NUMBERS
from millrace_rpc.errors import MillraceError
from millrace_rpc.server import parse

from millrace_router.flow import validate
from millrace_router.flow.ask import Ask, Chat, Prompt
from millrace_router.flow.inference import Inference
from millrace_router.flow.slow_clients import Patience
from millrace_router.flow.stream import Delta, gone
from millrace_router.queue.tenant import caller

SERVICE = "millrace.v1.Inference"
SMALL = 1 << 12  # bytes of a request that is read and rendered on the event loop
P = TypeVar("P", bound=Proto)


class InferenceService:
    def __init__(self, inference: Inference, clock: asyncio.AbstractEventLoop | None = None) -> None:
        """`clock`: of the patience with clients that do not read; none: the event loop."""
        self._inference = inference
        self._clock = clock

    async def generate(self, data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
        with self._charged(data):
            with self._inference.counting("grpc"):
                request = self._read(pb.GenerateRequest, data)
                request_id.set(request.request_id)
                left_s, large = context.time_remaining(), len(data) > SMALL
                validate.check_counts(request.prompt, self._inference.model, request.sampling, request.stop)
                ask = await self._inference.bodies.read(lambda: to_ask(request, left_s, large), large)
            answer = await self._inference.generate(ask, "grpc")
        context.add_done_callback(lambda _: answer.stream.close(gone()))
        limit_s = self._inference.backend.config.timeouts.client
        with Patience(answer.stream, context, limit_s, self._clock or asyncio.get_running_loop()) as patience:
            async for delta in answer.stream.deltas():
                response = _response(delta, answer.request_id, answer.model, answer.prompt_tokens)
                patience.leave()
                yield response
                patience.away = False

    async def tokenize(self, data: bytes, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        with self._charged(data):
            request = self._read(pb.TokenizeRequest, data)
            validate.check_counts(request.prompt, self._inference.model)
            large = len(data) > SMALL
            prompt = await self._inference.bodies.read(lambda: _prompt(request.prompt), large)
            ask = Ask(model=request.model, prompt=prompt, large=large)
            return pb.TokenizeResponse(token_ids=await self._inference.prompt_tokens(ask))

    async def detokenize(self, data: bytes, context: grpc.aio.ServicerContext) -> pb.DetokenizeResponse:
        with self._charged(data):
            request = self._read(pb.DetokenizeRequest, data)
            given = request.model, "token_ids", request.token_ids, request.keep_special_tokens
            return pb.DetokenizeResponse(text=await self._inference.text_of(*given))

    async def list_models(self, data: bytes, context: grpc.aio.ServicerContext) -> pb.ListModelsResponse:
        with self._charged(data):
            self._read(pb.ListModelsRequest, data)
            model = self._inference.model
        entries = [
            pb.Model(name=name, max_context=model.max_context, vocab_size=model.vocab_size)
            for name in self._inference.names
        ]
        return pb.ListModelsResponse(models=entries)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the handlers. They get bytes, whose number is limited."""
        unary, serialize = grpc.unary_unary_rpc_method_handler, methodcaller("SerializeToString")
        methods = {
            "Generate": grpc.unary_stream_rpc_method_handler(self.generate, None, serialize),
            "Tokenize": unary(self.tokenize, None, serialize),
            "Detokenize": unary(self.detokenize, None, serialize),
            "ListModels": unary(self.list_models, None, serialize),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _read(self, kind: type[P], data: bytes) -> P:
        """A message, unless its tenant may begin no request now.

        Raises INVALID_ARGUMENT for malformed bytes, MESSAGE_TOO_LARGE for too many, RATE_LIMITED.
        """
        caller.get().tenant.check(time.monotonic(), requests=0)
        validate.check_size(len(data), self._inference.backend.config.limits.message_bytes)
        return parse(kind.FromString, data)

    @contextlib.contextmanager
    def _charged(self, data: bytes) -> Iterator[None]:
        """The tenant is charged for a mistake that is found in the block."""
        try:
            yield
        except MillraceError as error:
            caller.get().tenant.refused(error, len(data), time.monotonic())
            raise


def to_ask(request: pb.GenerateRequest, timeout_s: float | None, large: bool = False) -> Ask:
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
        keep_s=request.keep_s,
        keep_special_tokens=request.keep_special_tokens,
        large=large,
        timeout_s=timeout_s,
    )


def _prompt(prompt: pb.Prompt) -> Prompt | None:
    match prompt.WhichOneof("prompt"):
        case "text":
            return prompt.text
        case "chat":
            return Chat(tuple({"role": turn.role, "content": turn.content} for turn in prompt.chat.messages))
        case "token_ids":
            return list(prompt.token_ids.ids)
    return None


def _response(delta: Delta, request_id: str, model: str, prompt_tokens: int) -> pb.GenerateResponse:
    """One for every token: assignments take half as long as keyword arguments."""
    response = pb.GenerateResponse()
    response.request_id = request_id
    response.index = delta.index
    response.text = delta.parsed.text
    response.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        response.logprobs.extend(delta.logprobs)
    response.finish_reason = delta.finish_reason
    usage = response.usage
    usage.MergeFrom(delta.usage)
    usage.prompt_tokens = prompt_tokens
    usage.cached_prompt_tokens = delta.cached_tokens
    usage.completion_tokens = delta.completion_tokens
    if delta.first:
        response.model = model
    if delta.finish_reason:
        response.weights_version = delta.version
    return response
