"""Spans of a request in every process that it passes, for OpenTelemetry.

A trace context travels as W3C `traceparent` text: from the client, and from the router to the workers in EngineRequest.
Without an endpoint nothing is recorded, and the received context goes on unchanged. Times are those of the event loop's
clock (`loop.time()`, `time.monotonic()`), in seconds.
"""

import re

from millrace_common.spans import OFF, Tracer, Tracing

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


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
