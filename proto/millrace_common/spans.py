"""Spans and their tracer, as the code that makes spans sees them; tracing.py makes the tracer."""

from collections.abc import Mapping

from pydantic import Field

from millrace_common.config import Config

Attributes = Mapping[str, str | int | float | bool]
NO_ATTRIBUTES: Attributes = {}


class Tracing(Config):
    """Needs the packages of `millrace[tracing]`."""

    endpoint: str = Field("", pattern=r"^(https?://[^/\s]+)?$")  # OTLP over gRPC: http://collector:4317; empty: off
    sample: float = Field(1.0, ge=0, le=1)  # share of new traces that are sampled; a caller decides its own


class Span:
    """Begun; `traceparent` is for what happens within it. `end` is called once. This one records nothing."""

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def event(self, name: str, at: float) -> None:
        pass

    def end(self, at: float, attributes: Attributes = NO_ATTRIBUTES, error: str = "") -> None:
        pass


class Tracer:
    """Makes spans. This one records nothing: a received context goes on unchanged."""

    def begin(
        self, name: str, parent: str, at: float, attributes: Attributes = NO_ATTRIBUTES, server: bool = False
    ) -> Span:
        """`parent`: a checked traceparent; empty: a trace begins. `server`: on behalf of another process."""
        return Span(parent)

    def close(self) -> None:
        """Send what is left; blocks for seconds at most."""


OFF = Tracer()
