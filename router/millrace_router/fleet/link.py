"""One worker's Link: a long-lived stream with all requests of this router to that worker, and their outputs.

1. `connect` opens the stream, says hello with the worker's epoch and waits for the welcome.
2. `submit` registers a sub-request under its room and queues the message; a writer task sends what is queued.
3. `run` reads outputs and hands each to its sub-request. Outputs of unknown rooms or stale attempts are counted and
   dropped.
4. The stream ends (`run` raises) or `close` is called: every registered sub-request fails with WORKER_LOST at once.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol, TypeAlias

import grpc
from millrace.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2
from millrace_common.log import survived
from millrace_common.metrics import Metrics
from millrace_common.reasons import Reason
from millrace_rpc.client import reply
from millrace_rpc.errors import MillraceError

log = logging.getLogger(__name__)

Source: TypeAlias = prefill_pb2.KvPrefixRef | worker_pb2.KvSourceRef | None
PREFILL, DECODE, UNIFIED = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE, worker_pb2.ROLE_UNIFIED
FLEXIBLE = worker_pb2.ROLE_FLEXIBLE
ROLES = PREFILL, DECODE, UNIFIED, FLEXIBLE


class OutputReceiver(Protocol):
    attempt: int
    replica: int  # of its worker
    exports: bool  # another worker reads the KV and goes on
    heard: bool  # it has had tokens
    waits: bool  # at its worker, by its word

    def on_output(self, out: worker_pb2.SequenceOutput, now: float) -> None: ...

    def on_wait(self, over: bool, now: float) -> None: ...

    def on_failure(self, error: MillraceError) -> None: ...


class Link:
    def __init__(self, role: int, address: str, metrics: Metrics) -> None:
        self.address = address
        self._message = prefill_pb2.PrefillLinkRequest if role == PREFILL else decode_pb2.DecodeLinkRequest
        self._stub = prefill_pb2_grpc.PrefillServiceStub if role == PREFILL else decode_pb2_grpc.DecodeServiceStub
        self._stale = metrics.stale.labels(kind="output")
        self._subs: dict[int, OutputReceiver] = {}
        self.open: Counter[int] = Counter()  # sub-requests of each replica that do not export
        self.ended = object()  # another object after each end of one
        self._outgoing: asyncio.Queue[prefill_pb2.PrefillLinkRequest | decode_pb2.DecodeLinkRequest] = asyncio.Queue()
        self._call: grpc.aio.StreamStreamCall | None = None
        self._writer: asyncio.Task[None] | None = None
        self._closed: MillraceError | None = None
        self.on_message: Callable[[], None] = lambda: None

    @property
    def streams(self) -> bool:
        """Whether there are running sub-requests that have had tokens, and do not wait for others."""
        return any(sub.heard and not sub.waits for sub in self._subs.values())

    @property
    def in_flight(self) -> int:
        return len(self._subs)

    async def connect(self, channel: grpc.aio.Channel, hello: worker_pb2.LinkHello) -> None:
        self._outgoing.put_nowait(self._message(hello=hello))
        self._call = self._stub(channel).Link()
        self._writer = asyncio.create_task(self._send())
        response = await self._read()
        if response.welcome.epoch != hello.epoch:
            raise MillraceError(Reason.EPOCH_CHANGED, f"another process answers at {self.address}")

    async def run(self) -> None:
        """Read until the stream ends; never returns normally."""
        loop = asyncio.get_running_loop()
        subs = self._subs
        while True:
            response = await self._read()
            now = loop.time()
            self.on_message()
            for out in response.outputs.outputs:
                identity = out.id
                sub = subs.get(identity.room)
                if sub is not None and sub.attempt == identity.attempt:
                    try:
                        sub.on_output(out, now)
                    except Exception as error:
                        self.abort(identity.room, identity.attempt, "its output cannot be taken")
                        self._fail(sub, MillraceError.of(error, log, "an output of %s cannot be taken", self.address))
                elif out.finish_reason != common_pb2.FINISH_REASON_ABORT:  # which answers our own Abort
                    self._stale.inc()
            for wait in response.outputs.waits:
                sub = subs.get(wait.id.room)
                if sub is not None and sub.attempt == wait.id.attempt:
                    with survived(log, "a wait at %s cannot be noted", self.address):
                        sub.on_wait(wait.over, now)

    def submit(
        self, request: worker_pb2.EngineRequest, source: Source, sub: OutputReceiver, prompt: bytes = b""
    ) -> None:
        """`source` has KV for the request: cached pages where `sub` exports, else all of the prompt. `prompt`: that of
        the request, packed.
        """
        if self._closed is not None:
            sub.on_failure(self._closed)
            return
        self.forget(request.id.room)
        self._subs[request.id.room] = sub
        self.open[sub.replica] += not sub.exports
        message = self._submission(request, source, sub.exports)
        getattr(message, message.WhichOneof("message")).request.prompt = prompt  # nesting would copy it
        self._outgoing.put_nowait(message)

    def _submission(
        self, request: worker_pb2.EngineRequest, source: Source, exports: bool
    ) -> prefill_pb2.PrefillLinkRequest | decode_pb2.DecodeLinkRequest:
        if not exports:
            return decode_pb2.DecodeLinkRequest(submit=decode_pb2.DecodeRequest(request=request, source=source))
        prompt = prefill_pb2.PrefillRequest(request=request, prefix=source)
        if self._message is prefill_pb2.PrefillLinkRequest:
            return prefill_pb2.PrefillLinkRequest(submit=prompt)
        return decode_pb2.DecodeLinkRequest(prefill=prompt)

    def forget(self, room: int) -> None:
        """Drop a sub-request whose last output has arrived."""
        if sub := self._subs.pop(room, None):
            self.open[sub.replica] -= not sub.exports
            self.ended = object()

    def abort(self, room: int, attempt: int, reason: str) -> None:
        self.forget(room)
        identity = common_pb2.AttemptId(room=room, attempt=attempt)
        self._outgoing.put_nowait(self._message(abort=worker_pb2.AbortRequest(id=identity, reason=reason)))

    def close(self, error: MillraceError) -> None:
        """Fail every sub-request. Nothing is sent or received any more."""
        if self._closed is not None:
            return
        self._closed = error
        if self._call is not None and self._writer is not None:
            self._writer.cancel()
            self._call.cancel()
        subs, self._subs = list(self._subs.values()), {}
        for sub in subs:
            self._fail(sub, error)

    def _fail(self, sub: OutputReceiver, error: MillraceError) -> None:
        """A fault of ours with one sub-request costs no other: they would be lost, or never hear of a loss."""
        with survived(log, "a sub-request on %s did not take its failure", self.address):
            sub.on_failure(error)

    async def _send(self) -> None:
        """Write the queued messages. Returns when the stream is broken; `run` raises the reason."""
        assert self._call is not None
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._call.write(await self._outgoing.get())

    async def _read(self) -> worker_pb2.LinkResponse:
        assert self._call is not None
        response: worker_pb2.LinkResponse = await reply(self._call.read())
        if response is grpc.aio.EOF:
            raise MillraceError(Reason.WORKER_LOST, f"{self.address} closed the link")
        return response
