"""A worker's spans of an attempt, below the router's span of it.

    route       spans
    EXPORT      queue, prefill                  a prefill worker
    IMPORT      transfer (queue in it), decode  a decode worker; its queue is the wait for pages
    LOCAL       queue, prefill, decode          both phases here

An attempt without a trace context has no spans. The engine's first output reports the length of `queue`.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from millrace_common.spans import Span, Tracer

from millrace_serve.engine.core import FinishReason, RequestId, Route, SequenceOutput


@dataclass(slots=True)
class _AttemptSpans:
    route: Route
    parent: str
    began: float
    span: Span
    queue: Span | None = None
    answered: bool = False  # a token is out
    fetched: int = 0  # pages


class WorkerSpans:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._live: dict[RequestId, _AttemptSpans] = {}
        self._now = asyncio.get_running_loop().time

    def begin(self, id: RequestId, route: Route, traceparent: str, num_tokens: int) -> None:
        if traceparent:
            now = self._now()
            name = "transfer" if route is Route.IMPORT else "prefill"
            span = self._tracer.begin(name, traceparent, now, {"millrace.tokens": num_tokens}, server=True)
            self._live[id] = _AttemptSpans(route, traceparent, now, span)

    def waits_for_pages(self, id: RequestId) -> None:
        if (attempt := self._live.get(id)) is not None:
            attempt.queue = self._tracer.begin("queue", attempt.span.traceparent, self._now())

    def has_pages(self, id: RequestId) -> None:
        if (attempt := self._live.get(id)) is not None:
            _end_queue(attempt, self._now())

    def imported(self, id: RequestId, num_pages: int) -> None:
        """The KV has arrived: it decodes from now on."""
        if (attempt := self._live.get(id)) is not None:
            now = self._now()
            _end_queue(attempt, now)
            attempt.span.end(now, {"millrace.pages_read": num_pages})
            self._decode(attempt, now)

    def fetched(self, id: RequestId, num_pages: int) -> None:
        if (attempt := self._live.get(id)) is not None:
            attempt.fetched = num_pages

    def on_outputs(self, outputs: Iterable[SequenceOutput]) -> None:
        if not self._live:
            return
        for output in outputs:
            attempt = self._live.get(output.id)
            if attempt is None:
                continue
            now = self._now()
            if attempt.route is not Route.IMPORT and not attempt.answered and output.tokens:
                self._prefilled(output, attempt, now)
            if output.finish is not None or attempt.route is Route.EXPORT:
                self.end(output.id, _trouble(output))

    def end(self, id: RequestId, error: str = "") -> None:
        """Idempotent."""
        attempt = self._live.pop(id, None)
        if attempt is not None:
            _end_queue(attempt, self._now())
            attempt.span.end(self._now(), error=error)

    def close(self) -> None:
        for id in list(self._live):
            self.end(id, "the worker stopped")
        self._tracer.close()

    def _prefilled(self, output: SequenceOutput, attempt: _AttemptSpans, now: float) -> None:
        queue = self._tracer.begin("queue", attempt.span.traceparent, attempt.began)
        queue.end(attempt.began + output.queued_s)
        attempt.answered = True
        cached, fetched = output.found.cached_tokens, attempt.fetched
        attempt.span.end(now, {"millrace.cached_tokens": cached, "millrace.pages_fetched": fetched})
        if attempt.route is Route.LOCAL:
            self._decode(attempt, now)
        else:
            attempt.span = Span("")  # nothing follows on a prefill worker

    def _decode(self, attempt: _AttemptSpans, now: float) -> None:
        attempt.span = self._tracer.begin("decode", attempt.parent, now, server=True)
        attempt.answered = True


def _end_queue(attempt: _AttemptSpans, now: float) -> None:
    if attempt.queue is not None:
        attempt.queue.end(now)
        attempt.queue = None


def _trouble(output: SequenceOutput) -> str:
    if output.error is not None:
        return f"{output.error.reason}: {output.error.message}"
    return "aborted" if output.finish is FinishReason.ABORT else ""
