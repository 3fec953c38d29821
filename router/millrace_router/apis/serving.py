"""A request of any of the HTTP APIs, from its body to the last event of its answer."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from millrace_common.json_values import Json
from millrace_common.log import request_id
from millrace_rpc.errors import FieldError, MillraceError, Path
from millrace_rpc.http_connection import Body, body_of
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millrace_router.apis.openai.chat import in_format
from millrace_router.apis.openai.types import ApiRequest, Asking, Strict, parse
from millrace_router.apis.reading import Reading
from millrace_router.flow.ask import Ask
from millrace_router.flow.heartbeat import Heartbeat
from millrace_router.flow.inference import Answer, Inference
from millrace_router.flow.slow_clients import lose
from millrace_router.flow.stream import Delta, Stream, gone
from millrace_router.http.answers import json_answer, names, read_body, received
from millrace_router.http.json_shape import SHORT, TINY, shape
from millrace_router.queue.tenant import caller

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Strict)
X = TypeVar("X", bound=ApiRequest)
Made = TypeVar("Made")
A = TypeVar("A", bound=Asking)


class AnswerFormat(Protocol):
    """How an API tells an answer: at once, or as server-sent events."""

    @property
    def keep_alive(self) -> bytes:
        """Says nothing but that the stream lives."""

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """The JSON value of a finished answer."""

    def push(self, delta: Delta) -> bytes:
        """The events of a delta; those of the first begin the stream."""

    def end(self) -> bytes: ...

    def fail(self, error: MillraceError) -> bytes:
        """The last events of a stream that ends early, perhaps before its first delta."""


async def read(
    inference: Inference, request: Request, kind: type[R], make: Callable[[R], Made]
) -> tuple[R, Made, bool]:
    """The request in the body, what is made of it, and whether it is large.

    A body is read only while its tenant may begin requests, a large one received only then. It is read in a thread,
    `make` too.
    """
    config, tenant = inference.backend.config, caller.get().tenant
    if not received(request) and int(request.headers.get("content-length", SHORT)) >= SHORT:
        tenant.check(time.monotonic())
    with inference.bodies.hold(tenant.name) as take:
        body = await read_body(request, config.limits.message_bytes, config.bodies, take)
        tenant.check(time.monotonic())
        large = len(body) > SHORT or (len(body) > TINY and not shape(body).small)
        longest = inference.model.max_context if large else 0

        def work() -> tuple[R, Made]:
            if large:
                shape(body).check(longest)
            wanted = parse(kind, body)
            return wanted, make(wanted)

        return *await inference.bodies.read(work, large), large


async def read_ask(inference: Inference, request: Request, kind: type[A]) -> tuple[A, Ask]:
    """The same for a request that becomes an `Ask`, perhaps in a thread."""
    form, name = inference.tokenizer.format, request_id.get()
    wanted, ask, large = await read(inference, request, kind, lambda wanted: in_format(wanted.ask(name), form))
    return wanted, replace(ask, large=True) if large else ask


@contextlib.contextmanager
def named(origins: Mapping[Path, Path]) -> Iterator[None]:
    """Let errors about a field name the field that it comes from, as `FieldError.renamed` does."""
    try:
        yield
    except FieldError as error:
        raise error.renamed(origins) from error


async def serve(
    inference: Inference, request: Request, ask: Ask, form_of: Callable[[Answer], AnswerFormat], stream: bool
) -> Response:
    if session_id := request.headers.get("x-session-id", ""):
        origins = {**ask.origins, ("session_id",): ("x-session-id",)}
        ask = replace(ask, session_id=session_id, origins=origins)
    with contextlib.ExitStack() as ends, named(ask.origins):
        answer = await inference.generate(ask, "http")
        ends.callback(answer.stream.close, gone())
        ends.callback(asyncio.create_task(_watch(request, answer.stream)).cancel)
        form = form_of(answer)
        if not stream:
            return json_answer(form.whole([delta async for delta in answer.stream.deltas()]))
        beat = Heartbeat(inference.backend.config.connections.keep_alive, asyncio.get_running_loop())
        if (body := body_of(request.scope)) is not None:
            answer.stream.sink = _Direct(body, form, beat)
            body.on_stall = functools.partial(lose, answer.stream, inference.backend.config.timeouts.client)
            ends.callback(setattr, body, "on_stall", None)
        return _Sse(form, answer.stream, beat, ends.pop_all(), ask.origins)


async def serve_blocks(
    inference: Inference, request: Request, kind: type[X], form_of: Callable[[X, Answer, Reading], AnswerFormat]
) -> Response:
    with inference.counting("http"):
        wanted, ask = await read_ask(inference, request, kind)

    def form(answer: Answer) -> AnswerFormat:
        return form_of(wanted, answer, Reading(answer, inference.tokenizer))

    return await serve(inference, request, ask, form, wanted.stream)


async def _watch(request: Request, stream: Stream) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stream.cancel(gone())


class _Direct:
    """The sink of a stream whose head is sent."""

    def __init__(self, body: Body, form: AnswerFormat, beat: Heartbeat) -> None:
        self._body = body
        self._form = form
        self._beat = beat

    @property
    def ready(self) -> bool:
        return self._body.ready

    def push(self, delta: Delta) -> None:
        if data := self._form.push(delta):
            self._body.write(data)
            self._beat.sent_at = self._beat.now()


class _Sse(Response):
    """The answer begins with the first delta, so that a failure before it is an HTTP status; or with a heartbeat. Does
    what `ends` holds, whatever happens to the connection.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        form: AnswerFormat,
        stream: Stream,
        beat: Heartbeat,
        ends: contextlib.ExitStack,
        origins: Mapping[Path, Path],
    ) -> None:
        self._form, self._stream, self._beat, self._ends, self._origins = form, stream, beat, ends, origins
        self._begun = False
        self._beating: asyncio.Task[None] | None = None
        self.init_headers(names() | {"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def beat() -> None:
            if self._beating is None or self._beating.done():  # else the client does not read
                self._beating = asyncio.create_task(self._say(send, self._form.keep_alive))

        failure: MillraceError | None = None
        with self._ends:
            self._beat.start(beat)
            try:
                with named(self._origins):
                    async for delta in self._stream.deltas():
                        await self._say(send, self._form.push(delta))
                last = self._form.end()
            except Exception as error:
                failure = MillraceError.of(error, log, "the answer of a stream failed")
            finally:
                self._beat.stop()
            if self._beating is not None:
                await self._beating
            if failure is not None:
                self._stream.close(failure)  # else who reads it would seem to have gone
                if not self._begun:
                    raise failure
                last = self._form.fail(failure)
            await self._say(send, last, more=False)

    async def _say(self, send: Send, data: bytes, more: bool = True) -> None:
        self._beat.sent_at = self._beat.now()
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})
