"""The attempts that a worker works on: admission, start, outputs, abort and failure, for routers' requests and its own.

An attempt lives here (its owner gets its outputs), in an engine, and, on a worker that exports or imports KV, in the
role (`on_start`, `on_abort`). It ends here with its final output, with a prefill worker's first token (the only output
that is due there), by `fail`, or when its owner is dropped.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from millrace.v1 import worker_pb2
from millrace_common import tracing
from millrace_common.log import survived
from millrace_common.metrics import Metrics
from millrace_common.reasons import Reason
from millrace_rpc.errors import FieldError, MillraceError

from millrace_serve.engine.core import (
    Abort,
    Failure,
    FinishReason,
    Request,
    RequestId,
    Route,
    SequenceOutput,
    Submit,
    Wait,
)
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.frontend import convert, warmup
from millrace_serve.worker.frontend.lifecycle import Lifecycle, State
from millrace_serve.worker.frontend.ranks import Ranks
from millrace_serve.worker.frontend.spans import WorkerSpans
from millrace_serve.worker.frontend.wakeup import Wakeup

log = logging.getLogger(__name__)

ABORTED = Failure(Reason.CANCELLED, "the attempt was aborted")
# For readers of its pages, whose own link to that router may live: it is tried again, and no fault of theirs.
ORPHANED = Failure(Reason.NOT_READY, "the link to the router of this attempt closed")


class Owner(Protocol):
    """Its methods must not block."""

    def put(self, output: SequenceOutput) -> None: ...

    def tell(self, wait: Wait) -> None: ...


class Attempt(NamedTuple):
    owner: Owner
    replica: int
    route: Route


class Requests:
    def __init__(
        self, config: WorkerConfig, lifecycle: Lifecycle, ranks: Ranks, spans: WorkerSpans, metrics: Metrics
    ) -> None:
        self.changed = Wakeup()  # fires when an attempt ends
        # what a role does for an attempt besides the engine's work; `on_abort` gets why the attempt ends, for whoever
        # reads or serves its pages, and returns whether there was anything
        self.on_start: Callable[[Request, int], None] = lambda request, replica: None
        self.on_abort: Callable[[RequestId, Failure], bool] = lambda id, why: False
        self._replicas, self._max_tokens = config.dp, config.limits.max_model_len
        self._lifecycle = lifecycle
        self._ranks = ranks
        self._spans = spans
        self._metrics = metrics
        self._live: dict[RequestId, Attempt] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, id: RequestId) -> bool:
        return id in self._live

    def __iter__(self) -> Iterator[RequestId]:
        return iter(list(self._live))

    def check_admission(self) -> None:
        """Raises MillraceError unless requests of routers are admitted."""
        state = self._lifecycle.state
        if state is State.READY:
            return
        if state in (State.DRAINING, State.STOPPED):
            raise MillraceError(Reason.DRAINING, "the worker drains")
        raise MillraceError(Reason.NOT_READY, f"the worker is {state}: {self._lifecycle.message}".rstrip(": "))

    def submit(
        self, wire: worker_pb2.EngineRequest, route: Route, owner: Owner, fetches_prefix: bool = False
    ) -> Request | None:
        """Admit a router's request and give it to an engine. None: the owner has submitted the same attempt before,
        and its answer is coming. Raises MillraceError when the request is refused.
        """
        self.check_admission()
        if wire.replica >= self._replicas:
            raise FieldError("replica", f"is {wire.replica}; the worker has {self._replicas}")
        request = convert.request(wire, route, self._max_tokens, fetches_prefix)
        known = self._live.get(request.id)
        if known is not None and known.owner is owner:
            self.count_stale("submit")
            return None
        if known is not None:
            raise FieldError("id", f"{request.id} belongs to another router")
        self._spans.begin(request.id, route, tracing.checked(wire.traceparent), len(request.token_ids))
        self._start(request, wire.replica, owner)
        return request

    async def run_own(self, request: Request, replica: int, begin: Callable[[], None] = lambda: None) -> None:
        """Run a request of the worker itself; `begin` is called when the engine has it. Raises MillraceError."""
        waiter = warmup.Waiter(request.route)
        try:
            self._start(request, replica, waiter)
            begin()
            await waiter.wait()
        finally:
            self.on_abort(request.id, ABORTED)
            if request.id in self:
                self.abort(request.id, "the warm-up is over")

    def deliver(self, outputs: Iterable[SequenceOutput]) -> None:
        """Give outputs of an engine to the owners of their attempts."""
        for output in outputs:
            attempt = self._live.get(output.id)
            if attempt is None:
                if output.finish is not FinishReason.ABORT:  # which answers our own Abort
                    self.count_stale("output")
                continue
            try:
                attempt.owner.put(output)
            except Exception as error:  # a fault of ours: it would end the worker, and the next one with another try
                fault = MillraceError.of(error, log, "an output of %s cannot be told", output.id)
                self.fail(output.id, Failure(fault.reason, fault.message))
            else:
                if output.finish is not None or attempt.route is Route.EXPORT:
                    self._end(output.id)

    def tell(self, waits: Iterable[Wait]) -> None:
        """Give the waits of an engine to the owners of their attempts."""
        for wait in waits:
            if (attempt := self._live.get(wait.id)) is not None:
                attempt.owner.tell(wait)

    def abort(self, id: RequestId, reason: str, why: Failure = ABORTED) -> bool:
        """Stop an attempt wherever it is; its owner gets the engine's last output, readers of its pages `why`. False:
        there is no such attempt.
        """
        attempt = self._live.get(id)
        if attempt is not None:
            log.debug("abort %s: %s", id, reason)
            self._ranks.send(attempt.replica, Abort(id))
        found = attempt is not None
        with survived(log, "what %s holds cannot be let go", id):  # whoever aborts an attempt may abort others as well
            found = self.on_abort(id, why) or found
        if not found:
            self.count_stale("abort")
        return found

    def fail(self, id: RequestId, failure: Failure) -> bool:
        """End an attempt now, with an error, and stop the engine's work on it. False: there is no such attempt."""
        attempt = self._live.get(id)
        if attempt is not None:
            self._tell(id, failure)
            self._spans.end(id, f"{failure.reason}: {failure.message}")
            self._ranks.send(attempt.replica, Abort(id))
            with survived(log, "what %s holds cannot be let go", id):
                self.on_abort(id, failure)
        return attempt is not None

    def fail_all(self, failure: Failure) -> None:
        """End every attempt; there is no engine any more."""
        for id in self:
            self._tell(id, failure)

    def drop(self, owner: Owner) -> None:
        """Abort all attempts of `owner`, which is gone and gets no answers."""
        for id in self:
            if self._live[id].owner is owner:
                self.abort(id, "its router's link closed", ORPHANED)
                self._end(id)

    def count_stale(self, kind: str) -> None:
        self._metrics.worker_stale.labels(kind=kind).inc()

    def _start(self, request: Request, replica: int, owner: Owner) -> None:
        assert request.id not in self._live, f"{request.id} is live"
        self._live[request.id] = Attempt(owner, replica, request.route)
        self.on_start(request, replica)
        self._ranks.send(replica, Submit(request))

    def _tell(self, id: RequestId, failure: Failure) -> None:
        owner = self._live[id].owner
        self._end(id)
        owner.put(SequenceOutput(id, 0, [], FinishReason.ERROR, failure))

    def _end(self, id: RequestId) -> None:
        del self._live[id]
        self.changed.fire()
