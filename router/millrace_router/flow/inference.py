"""The common part of gRPC and HTTP: from an unchecked `Ask` to a stream of deltas.

1. Check the limits, the caller's rates, and that the queue has room. 2. Compile the grammar. 3. Tokenize. 4. Check the
   context, and with it the queue once more. 5. Start one generation per continuation. Every request is counted once, by
   its end.
"""

import asyncio
import contextlib
import functools
import math
import secrets
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from millrace.v1 import common_pb2, worker_pb2
from millrace_common.spans import Attributes, Span
from millrace_rpc.errors import MillraceError, check_count

from millrace_router.flow import validate
from millrace_router.flow.ask import Ask, Chat, Prompt
from millrace_router.flow.bodies import Bodies
from millrace_router.flow.generation import AnswerWeights, Backend, Generation, Job
from millrace_router.flow.grammars import RequestGrammars
from millrace_router.flow.metrics import observe_generation
from millrace_router.flow.rounds import Rounds
from millrace_router.flow.spans import ContinuationSpans
from millrace_router.flow.stream import AnswerText, Continuation, Stream, gone
from millrace_router.queue.fair_queue import Place
from millrace_router.queue.tenant import Tenant, caller
from millrace_router.text.message import MessageParser
from millrace_router.text.tokenizer import Tokenizer, TooManyTokens

LAST_WORDS_S = 1.0  # for clients to read the error of a stream that was cut off


@dataclass(frozen=True, slots=True)
class Answer:
    request_id: str
    model: str
    prompt_tokens: int
    thinking: bool  # the prompt ends inside the model's reasoning
    stream: Stream
    ignored: Mapping[str, str] = field(default_factory=dict)  # of the request, as in `Chat`
    cacheable_tokens: int = 0  # of the prompt, in full pages, which stay in the prefix cache

    def written_tokens(self, cached: int) -> int:
        """Prompt tokens that came into the prefix cache, when `cached` of them were there."""
        return max(self.cacheable_tokens - cached, 0)


class Inference:
    def __init__(self, backend: Backend, tokenizer: Tokenizer) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.active: set[Stream] = set()
        self.bodies = Bodies(backend.config.bodies.held, backend.config.bodies.held_by_tenant)
        self._grammars = RequestGrammars()
        self._rounds = Rounds(asyncio.get_running_loop(), backend.config.stream_interval)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def model(self) -> worker_pb2.WorkerInfo:
        return self.backend.registry.model

    @property
    def names(self) -> tuple[str, ...]:
        return self.backend.registry.names

    async def generate(self, ask: Ask, api: str) -> Answer:
        """Start the request; the caller reads `answer.stream.deltas()` to the end, or leaves it."""
        received, who = asyncio.get_running_loop().time(), caller.get()
        request_id = ask.request_id or secrets.token_hex(12)
        about = {"millrace.api": api, "millrace.tenant": who.tenant.name, "millrace.request_id": request_id}
        tracer, unread = self.backend.tracer, self.backend.config.limits.unread * ask.n
        span = tracer.begin("generate", who.traceparent, received, about, server=True)
        with self.counting(api, span):
            token_ids, sampling, places = await self._admit(ask, who.tenant, received)
        route = tracer.begin("route", span.traceparent, received)
        route.end(asyncio.get_running_loop().time(), {"millrace.prompt_tokens": len(token_ids)})
        stream = Stream(lambda error: self._ended(stream, api, who.tenant, span, error), unread, self._rounds)
        answer, thinking = AnswerWeights(), self.tokenizer.thinking(token_ids)
        for i, place in enumerate(places):
            job = Job(
                token_ids=token_ids,
                sampling=_seeded(sampling, i),
                place=place,
                request_id=request_id,
                received=received,
                deadline=None if ask.timeout_s is None else received + ask.timeout_s,
                tenant=who.tenant,
                answer=answer,
                session_id=ask.session_id,
                keep_s=ask.keep_s,
                least_outputs=_least_outputs(ask, sampling),
            )
            below = ContinuationSpans(tracer, span.traceparent, i)
            generation = Generation(self.backend, job, below, stream.wake)
            text, on_gap = self._text(ask, thinking), self.backend.metrics.itl.observe
            stream.continuations.append(Continuation(i, generation, text, on_gap))
        self._started(stream, len(token_ids))
        for continuation in stream.continuations:
            continuation.generation.start()
        ignored = ask.prompt.ignored if isinstance(ask.prompt, Chat) else {}
        model, page = self.model, max(self.model.layout.page_size, 1)
        cacheable = len(token_ids) // page * page if model.prefix_cache else 0
        return Answer(request_id, model.model, len(token_ids), thinking, stream, ignored, cacheable)

    @contextlib.contextmanager
    def counting(self, api: str, span: Span = Span("")) -> Iterator[None]:
        """Count a request that ends in the block, before it has a stream."""
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            self._count(api, caller.get().tenant, span, error if isinstance(error, Exception) else gone())
            raise

    def _text(self, ask: Ask, thinking: bool) -> AnswerText:
        chat, keep_special = ask.prompt, ask.keep_special_tokens
        if not ask.message or not isinstance(chat, Chat):
            return AnswerText(self.tokenizer, MessageParser.of_plain_text(), ask.stop, keep_special=keep_special)
        offer = chat.offer(certain=ask.calls is not None)
        parser = MessageParser(self.tokenizer.format, thinking=thinking, offer=offer)
        one_call = bool(chat.tools) and not chat.parallel
        return AnswerText(self.tokenizer, parser, ask.stop, keep_special=keep_special, one_call=one_call)

    async def _admit(
        self, ask: Ask, tenant: Tenant, received: float
    ) -> tuple["array[int]", common_pb2.SamplingParams, list[Place]]:
        """The prompt's tokens, the resolved parameters, and the continuations' places in the queue, of a request that
        may begin. Raises MillraceError.
        """
        model, admission = self.model, self.backend.admission
        validate.check(ask, model, self.names, self.backend.config)
        tenant.check(time.monotonic(), ask.n)
        priority = tenant.allowed(ask.priority)
        places = [admission.place(priority, tenant.name, tenant.weight) for _ in range(ask.n)]
        admission.check_room(ask.n, places[0])
        ask = await self._grammars.settle(ask, self.tokenizer.added_token, tenant.name)
        token_ids = array("I", await self.tokenize(ask.prompt, model, ask.large, model.max_context))
        sampling = validate.fit(ask, len(token_ids), model)
        self.tokenizer.after_reasoning(sampling, token_ids)
        passed = asyncio.get_running_loop().time() - received
        tokens = ask.n * (len(token_ids) + sampling.max_tokens)
        tenant.check(time.monotonic(), ask.n, tokens)  # others came meanwhile
        admission.make_room(ask.n, places[0], len(token_ids), None if ask.timeout_s is None else ask.timeout_s - passed)
        tenant.begin(ask.n * len(token_ids), time.monotonic())
        return token_ids, sampling, places

    async def prompt_tokens(self, ask: Ask) -> list[int]:
        """The token ids that workers would get. Raises MillraceError."""
        validate.check(ask, self.model, self.names, self.backend.config)
        caller.get().tenant.take(time.monotonic())
        return await self.tokenize(ask.prompt, self.model, ask.large, math.inf)

    async def text_of(self, model: str, field: str, ids: Sequence[int], keep_special: bool) -> str:
        """The text of token ids, which the request has in `field`. Raises MillraceError."""
        validate.check_model(model, self.names)
        check_count(field, len(ids), validate.MORE_IDS + 2 * self.model.max_context)
        validate.check_ids(field, ids, self.model)
        caller.get().tenant.take(time.monotonic())
        return await asyncio.to_thread(self.tokenizer.decode, ids, keep_special)

    async def tokenize(
        self, prompt: Prompt | None, model: worker_pb2.WorkerInfo, large: bool, most: float
    ) -> list[int]:
        """Token ids, at most so many, of a prompt that `check_prompt` has passed. `large`: it takes long to render."""
        assert prompt is not None
        if isinstance(prompt, list):
            return prompt
        if isinstance(prompt, str):
            text = prompt
        else:
            render = functools.partial(self.tokenizer.render, prompt.messages, prompt.tools, prompt.arguments)
            text = await self.bodies.read(render, large)
        validate.check_text_length(text, self.tokenizer.longest_token, model)
        try:
            return await self.tokenizer.encode(text, isinstance(prompt, str), most)
        except TooManyTokens as error:
            raise validate.too_long(model, *error.args) from error

    async def drain(self, grace_s: float, error: MillraceError) -> None:
        """Refuse new requests, wait for the running ones, then end the rest with `error`. A client that does not read
        does not delay this.
        """
        self.backend.admission.closed = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for stream in list(self.active):
                stream.cancel(error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), LAST_WORDS_S)
        self._grammars.close()

    def _started(self, stream: Stream, prompt_tokens: int) -> None:
        self.active.add(stream)
        self._idle.clear()
        self.backend.metrics.active.set(len(self.active))
        self.backend.metrics.tokens.labels(direction="prompt").inc(prompt_tokens * len(stream.continuations))

    def _ended(self, stream: Stream, api: str, tenant: Tenant, span: Span, error: MillraceError | None) -> None:
        self.active.discard(stream)
        if not self.active:
            self._idle.set()
        metrics = self.backend.metrics
        metrics.active.set(len(self.active))
        prompt = output = unserved = 0
        for continuation in stream.continuations:
            generation = continuation.generation
            observe_generation(metrics, generation)
            prompt, output = len(generation.job.token_ids), output + len(generation.flow.outputs)
            self.backend.admission.charge(generation.job.place, len(generation.flow.outputs))
            if not generation.flow.tries:
                unserved += 1
                if generation.flow.attempt >= 0:  # the queue charged an attempt that a worker refused
                    self.backend.admission.charge(generation.job.place, -prompt)
        tenant.spend(output, time.monotonic())
        if unserved:
            whole = unserved == len(stream.continuations)
            tenant.give_back(unserved * prompt, time.monotonic(), request=whole)
        for direction, tokens in (("prompt", prompt * len(stream.continuations)), ("output", output)):
            metrics.tenant_tokens.labels(tenant=tenant.name, direction=direction).inc(tokens)
        self._count(api, tenant, span, error, output)

    def _count(self, api: str, tenant: Tenant, span: Span, error: Exception | None, output_tokens: int = 0) -> None:
        told = None if error is None else MillraceError.of(error)
        status = "ok" if told is None else told.reason.lower()
        metrics = self.backend.metrics
        metrics.requests.labels(api=api, status=status).inc()
        metrics.tenant_requests.labels(tenant=tenant.name, status=status).inc()
        about: Attributes = {"millrace.status": status, "millrace.output_tokens": output_tokens}
        span.end(asyncio.get_running_loop().time(), about, "" if told is None else str(told))


def _least_outputs(ask: Ask, sampling: common_pb2.SamplingParams) -> int:
    """Tokens before which nothing ends the answer."""
    if ask.stop:
        return 0
    endless = sampling.ignore_eos and not sampling.stop_token_ids
    return sampling.max_tokens if endless else sampling.min_tokens


def _seeded(sampling: common_pb2.SamplingParams, i: int) -> common_pb2.SamplingParams:
    if i == 0:
        return sampling
    copy = common_pb2.SamplingParams()
    copy.CopyFrom(sampling)
    copy.seed = (sampling.seed + i) % 2**64
    return copy
