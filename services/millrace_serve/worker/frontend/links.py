"""The long-lived streams of routers. One Link carries all requests of one router to this worker and all their outputs
back.

Life of a Link:

1. `Links.Link`: the first message must be LinkHello with our epoch, or the stream ends with a status. LinkWelcome is
   the answer.
2. Submits and aborts are taken one by one, in order. A refused submit is answered by a final output with a Failure.
3. Outputs of engines are collected in an Outbox. A message to the router takes all of them: one message per engine step
   if the router keeps up, merged ones if it does not. Nothing waits for a slow router.
4. The stream ends: by the router, by a broken connection, or by `end` (the worker stops). All unfinished attempts of
   the router are aborted.
"""

import asyncio
import collections
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import Message
from millrace.v1 import worker_pb2
from millrace_common.log import PER_REQUEST
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_serve.engine.core import Failure, FinishReason, RequestId, SequenceOutput, Wait
from millrace_serve.worker.frontend import convert
from millrace_serve.worker.frontend.requests import Requests
from millrace_serve.worker.frontend.wakeup import Wakeup

log = logging.getLogger(__name__)

MAX_TOKENS = 4096  # of one entry and of one message: with 20 logprobs each, a tenth of what the transport takes


class LinkOutbox:
    """Outputs that wait for one router. The number of entries is bounded without dropping any: while a router is slow,
    the outputs of one sequence are merged into one entry, or one per MAX_TOKENS.
    """

    def __init__(self) -> None:
        self._entries: collections.deque[worker_pb2.SequenceOutput] = collections.deque()
        self._latest: dict[RequestId, worker_pb2.SequenceOutput] = {}  # the last entry of each sequence

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, output: SequenceOutput) -> None:
        wire, waiting = convert.wire_output(output), self._latest.get(output.id)
        if waiting is None or len(waiting.token_ids) + len(wire.token_ids) > MAX_TOKENS:
            self._entries.append(wire)
            self._latest[output.id] = wire
        else:
            wire.first_index = waiting.first_index
            waiting.MergeFrom(wire)

    def take(self) -> list[worker_pb2.SequenceOutput]:
        """The next message's worth, oldest first."""
        taken: list[worker_pb2.SequenceOutput] = []
        budget = MAX_TOKENS
        while self._entries and (not taken or len(self._entries[0].token_ids) <= budget):
            entry = self._entries.popleft()
            budget -= len(entry.token_ids)
            id = RequestId(entry.id.room, entry.id.attempt)  # a refusal may be of what no request may be
            if self._latest.get(id) is entry:
                del self._latest[id]
            taken.append(entry)
        return taken


class RouterLink:
    """The owner of a router's attempts."""

    def __init__(self, router_id: str, cache_key_id: bytes = b"") -> None:
        self.router_id = router_id
        self.cache_key_id = cache_key_id
        self._outbox = LinkOutbox()
        self._waits: dict[RequestId, Wait] = {}  # the latest of each attempt
        self._changed = Wakeup()
        self._ended = False
        self._error: MillraceError | None = None

    def put(self, output: SequenceOutput) -> None:
        self._outbox.put(output)
        self._changed.fire()

    def tell(self, wait: Wait) -> None:
        self._waits[wait.id] = wait
        self._changed.fire()

    def end(self, error: MillraceError | None = None) -> None:
        """End the stream after the queued outputs. `error` becomes the stream's status."""
        if not self._ended:
            self._ended, self._error = True, error
            self._changed.fire()

    async def messages(self) -> AsyncIterator[worker_pb2.LinkResponse]:
        while True:
            if self._outbox or self._waits:
                told, self._waits = self._waits.values(), {}
                waits = [worker_pb2.Wait(id=convert.attempt_id(wait.id), over=wait.over) for wait in told]
                step = worker_pb2.StepOutputs(outputs=self._outbox.take(), waits=waits)
                yield worker_pb2.LinkResponse(outputs=step)
            elif not self._ended:
                await self._changed.wait()
            elif self._error is not None:
                raise self._error
            else:
                return


class Links:
    """All Links of a worker: the servicer of PrefillService or DecodeService. `submit(link, message)` starts work, or
    raises MillraceError. `on_change` gets the routers whose Links are open, in order.
    """

    def __init__(
        self,
        epoch: str,
        requests: Requests,
        submit: Callable[[RouterLink, Any], None],  # of the role's own kind
        on_change: Callable[[list[str]], None] = lambda routers: None,
    ) -> None:
        self.epoch = epoch
        self._requests = requests
        self._submit = submit
        self._on_change = on_change
        self._open: set[RouterLink] = set()

    async def Link(
        self, requests: AsyncIterator[Message], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.LinkResponse]:
        self._requests.check_admission()
        hello: worker_pb2.LinkHello = await opening(requests, "hello", "Link")
        check_epoch(hello.epoch, self.epoch)
        link = RouterLink(hello.router_id, hello.cache_key_id)
        self._compare_keys(link)
        self._open.add(link)
        self._changed(link, "opened")
        reader = asyncio.create_task(self._read(link, requests))
        # a generator that is suspended in a yield does not notice that its call is over
        context.add_done_callback(lambda _: self._close(link, reader))
        yield worker_pb2.LinkResponse(welcome=worker_pb2.LinkWelcome(epoch=self.epoch))
        async for message in link.messages():
            yield message

    def end_all(self, error: MillraceError) -> None:
        for link in self._open:
            link.end(error)

    async def _read(self, link: RouterLink, requests: AsyncIterator[Message]) -> None:
        """Read the Link. An unexpected error ends it with a status: a Link without a reader must not stay."""
        error = None
        try:
            async for message in requests:
                self._take(link, message)
        except (grpc.aio.UsageError, grpc.aio.AbortError):
            pass  # the stream is over
        except Exception as failure:
            error = MillraceError.of(failure, log, "link of router %s failed", link.router_id)
        link.end(error)

    def _take(self, link: RouterLink, message: Message) -> None:
        match message.WhichOneof("message"):
            case "submit" | "prefill" as kind:
                submitted = getattr(message, kind)
                try:
                    self._submit(link, submitted)
                except MillraceError as error:
                    link.put(refusal(submitted.request, error))
                except Exception as error:  # a fault of ours costs no other request, though an engine may have this one
                    fault = MillraceError.of(error, log, "a request of router %s cannot be taken", link.router_id)
                    refused = refusal(submitted.request, fault)
                    if not self._requests.fail(refused.id, Failure(fault.reason, fault.message)):
                        link.put(refused)
            case "abort":
                id = RequestId(message.abort.id.room, message.abort.id.attempt)
                self._requests.abort(id, message.abort.reason)
            case kind:
                link.end(MillraceError(Reason.INVALID_ARGUMENT, f"unexpected {kind or 'empty'} message on a Link"))

    def _compare_keys(self, link: RouterLink) -> None:
        others = (other for other in self._open if other.cache_key_id not in (b"", link.cache_key_id))
        if link.cache_key_id and (other := next(others, None)):
            message = "routers %s and %s have different secrets, so prompts share no cached pages: give both one secret"
            log.warning(message, link.router_id, other.router_id, extra=PER_REQUEST)

    def _changed(self, link: RouterLink, how: str) -> None:
        """A warm-up of another worker has a Link, too, but is no router."""
        log.info("link of %s %s", f"router {link.router_id}" if link.router_id else "a warm-up", how)
        self._on_change(sorted({other.router_id for other in self._open} - {""}))

    def _close(self, link: RouterLink, reader: asyncio.Task[None]) -> None:
        reader.cancel()
        link.end()
        if link in self._open:
            self._open.remove(link)
            self._changed(link, "closed")
            self._requests.drop(link)


def check_epoch(theirs: str, ours: str) -> None:
    if theirs != ours:
        message = f"epoch {theirs or '(empty)'} is not that of this process, {ours}"
        raise MillraceError(Reason.EPOCH_CHANGED, message)


def refusal(request: worker_pb2.EngineRequest, error: MillraceError) -> SequenceOutput:
    id = RequestId(request.id.room, request.id.attempt)
    failure = Failure(error.reason, error.message)
    return SequenceOutput(id, request.num_prior_outputs, [], FinishReason.ERROR, failure)


async def opening(requests: AsyncIterator[Message], kind: str, stream: str) -> Any:  # of `kind`
    """The content of the first message, which must be of this kind."""
    async for message in requests:
        if message.WhichOneof("message") == kind:
            return getattr(message, kind)
        break
    raise MillraceError(Reason.INVALID_ARGUMENT, f"the first message of a {stream} must be {kind}")
