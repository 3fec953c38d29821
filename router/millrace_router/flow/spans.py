"""The router's spans of a request: `queue` for each wait for workers, `attempt` from a submit to its end, both below
inference.py's `generate`. docs/reference/metrics.md shows the whole tree.

The continuations of a request share its span; `millrace.continuation` tells their attempts apart.
"""

from millrace_common.spans import NO_ATTRIBUTES, Attributes, Span, Tracer

from millrace_router.policy.choose import Decision


class ContinuationSpans:
    def __init__(self, tracer: Tracer, parent: str, index: int) -> None:
        self._tracer = tracer
        self._parent = parent
        self._index = index
        self._queue: Span | None = None
        self._attempt: Span | None = None

    @property
    def traceparent(self) -> str:
        """The trace context for the workers of the attempt."""
        return self._parent if self._attempt is None else self._attempt.traceparent

    def waits(self, now: float) -> None:
        self._queue = self._tracer.begin("queue", self._parent, now, {"millrace.continuation": self._index})

    def placed(self, now: float, attempt: int, decision: Decision) -> None:
        self.over(now)
        attributes = {"millrace.continuation": self._index, "millrace.attempt": attempt, **decision.attributes()}
        self._attempt = self._tracer.begin("attempt", self._parent, now, attributes)

    def first_token(self, at: float) -> None:
        if self._attempt is not None:
            self._attempt.event("first_token", at)

    def over(self, now: float, attributes: Attributes = NO_ATTRIBUTES, error: str = "") -> None:
        """The wait or the attempt that was going on, if any. Idempotent."""
        for span in (self._queue, self._attempt):
            if span is not None:
                span.end(now, attributes, error)
        self._queue = self._attempt = None
