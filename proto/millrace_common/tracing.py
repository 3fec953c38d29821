"""Spans of a request in every process that it passes, for OpenTelemetry.

A trace context travels as W3C `traceparent` text: from the client, and from the router to the workers in EngineRequest.
Without an endpoint nothing is recorded, and the received context goes on unchanged. Times are those of the event loop's
clock (`loop.time()`, `time.monotonic()`), in seconds.
"""

from __future__ import annotations

import re

from millrace_common.spans import NO_ATTRIBUTES, Attributes, Span, Tracer, Tracing

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class _NoSpan:
    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def event(self, name: str, at: float) -> None:
        pass

    def end(self, at: float, attributes: Attributes = NO_ATTRIBUTES, error: str = "") -> None:
        pass


class _Off:
    def begin(
        self, name: str, parent: str, at: float, attributes: Attributes = NO_ATTRIBUTES, server: bool = False
    ) -> Span:
        return _NoSpan(parent)

    def close(self) -> None:
        pass


OFF: Tracer = _Off()


def checked(traceparent: str) -> str:
    """Return a received trace context, or an empty string if it is invalid."""
    return traceparent if _TRACEPARENT.fullmatch(traceparent) else ""


def make(config: Tracing, service: str, instance: str) -> Tracer:
    """OSError when the packages are missing."""
    if not config.endpoint:
        return OFF
    try:
        from millrace_common.tracing_otel import exporting
    except ImportError as error:
        raise OSError(f"tracing.endpoint: needs millrace[tracing] to be installed ({error})") from error
    return exporting(config, service, instance)
