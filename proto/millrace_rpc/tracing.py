"""Spans of a request in every process that it passes, for OpenTelemetry.

A trace context travels as W3C `traceparent` text: from the client, and from the router to the workers in
EngineRequest. Without an endpoint nothing is recorded, and the context that came is handed on as it is. Times are
those of the event loop's clock (`loop.time()`, `time.monotonic()`), in seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

from pydantic import Field

from millrace_rpc.config import Config

Attributes = Mapping[str, str | int | float | bool]
NO_ATTRIBUTES: Attributes = {}
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Tracing(Config):
    """Needs the packages of `millrace[tracing]`."""

    endpoint: str = Field("", pattern=r"^(https?://[^/\s]+)?$")  # OTLP over gRPC: http://collector:4317; empty: off
    sample: float = Field(1.0, ge=0, le=1)  # of the traces that begin here; who brings one has decided already


class Span(Protocol):
    """Begun; `traceparent` is for what happens within it. `end` is called once."""

    traceparent: str

    def event(self, name: str, at: float) -> None: ...

    def end(self, at: float, attributes: Attributes = NO_ATTRIBUTES, error: str = "") -> None: ...


class Tracer(Protocol):
    def begin(
        self, name: str, parent: str, at: float, attributes: Attributes = NO_ATTRIBUTES, server: bool = False
    ) -> Span:
        """`parent`: a checked traceparent; empty: a trace begins. `server`: on behalf of another process."""

    def close(self) -> None:
        """Send what is left; blocks for seconds at most."""


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
    """What came from outside, or nothing if it is no trace context."""
    return traceparent if _TRACEPARENT.fullmatch(traceparent) else ""


def make(config: Tracing, service: str, instance: str) -> Tracer:
    """OSError when the packages are missing."""
    if not config.endpoint:
        return OFF
    try:
        from millrace_rpc.tracing_otel import exporting
    except ImportError as error:
        raise OSError(f"tracing.endpoint: needs millrace[tracing] to be installed ({error})") from error
    return exporting(config, service, instance)
