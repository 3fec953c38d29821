"""What gRPC and HTTP have in common: from an unchecked `Ask` to a stream of deltas.

1. Check the limits, and that the queue has room. 2. Tokenize. 3. Check the context. 4. Start one generation per
   continuation.
Every request that comes here is counted once, by how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass

from millrace.v1 import common_pb2, worker_pb2
from millrace_rpc.errors import MillraceError

from millrace_router import validate
from millrace_router.generation import Backend, Generation, Job
from millrace_router.metrics import observe_generation
from millrace_router.stream import Continuation, Stream, Text
from millrace_router.tokenizer import Tokenizer
from millrace_router.validate import Ask, Prompt

LAST_WORDS_S = 1.0  # for clients to read the error of a stream that was cut off


@dataclass(frozen=True, slots=True)
class Answer:
    request_id: str
    model: str
    prompt_tokens: int
    stream: Stream


class Inference:
    def __init__(self, backend: Backend, tokenizer: Tokenizer) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.active: set[Stream] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def model(self) -> worker_pb2.WorkerInfo:
        return self.backend.registry.model

    async def generate(self, ask: Ask, api: str) -> Answer:
        """Start the request; the caller reads `answer.stream.deltas()` to the end, or leaves it."""
        received = asyncio.get_running_loop().time()
        try:
            model, config = self.model, self.backend.config
            validate.check(ask, model, config.limits)
            self.backend.admission.check_room(ask.n)
            token_ids = await self.tokenize(ask.prompt, model)
            sampling = validate.fit(ask, len(token_ids), model)
            self.backend.admission.check_room(ask.n)
        except MillraceError as error:
            self._count(api, error)
            raise
        request_id = ask.request_id or secrets.token_hex(12)
        stream = Stream(lambda error: self._ended(stream, api, error))
        for i in range(ask.n):
            job = Job(
                token_ids=token_ids,
                sampling=_seeded(sampling, i),
                priority=ask.priority,
                request_id=request_id,
                received=received,
                deadline=None if ask.timeout_s is None else received + ask.timeout_s,
            )
            generation = Generation(self.backend, job, stream.wake)
            text = Text(self.tokenizer, ask.stop, ask.keep_special_tokens)
            stream.continuations.append(Continuation(i, generation, text, self.backend.metrics.itl.observe))
        self._started(stream, len(token_ids))
        for continuation in stream.continuations:
            continuation.generation.start()
        return Answer(request_id, model.model, len(token_ids), stream)

    async def tokenize(self, prompt: Prompt | None, model: worker_pb2.WorkerInfo) -> list[int]:
        """Token ids of a prompt that `validate.check_prompt` has passed."""
        assert prompt is not None
        if isinstance(prompt, list):
            return prompt
        text = prompt if isinstance(prompt, str) else self.tokenizer.render([m._asdict() for m in prompt])
        validate.check_text_length(text, self.tokenizer.longest_token, model)
        return await self.tokenizer.encode(text, add_bos=isinstance(prompt, str))

    async def drain(self, grace_s: float, error: MillraceError) -> None:
        """Refuse new requests, wait for the running ones, then end those that are left with `error`. A client that does
        not read cannot hold this up.
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

    def _started(self, stream: Stream, prompt_tokens: int) -> None:
        self.active.add(stream)
        self._idle.clear()
        self.backend.metrics.active.set(len(self.active))
        self.backend.metrics.tokens.labels(direction="prompt").inc(prompt_tokens)

    def _ended(self, stream: Stream, api: str, error: MillraceError | None) -> None:
        self.active.discard(stream)
        if not self.active:
            self._idle.set()
        self.backend.metrics.active.set(len(self.active))
        for continuation in stream.continuations:
            observe_generation(self.backend.metrics, continuation.generation)
        self._count(api, error)

    def _count(self, api: str, error: MillraceError | None) -> None:
        status = "ok" if error is None else error.reason.lower()
        self.backend.metrics.requests.labels(api=api, status=status).inc()


def _seeded(sampling: common_pb2.SamplingParams, i: int) -> common_pb2.SamplingParams:
    if i == 0:
        return sampling
    copy = common_pb2.SamplingParams()
    copy.CopyFrom(sampling)
    copy.seed = (sampling.seed + i) % 2**64
    return copy
