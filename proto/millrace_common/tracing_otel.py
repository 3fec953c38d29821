"""The tracer that records with the OpenTelemetry SDK. Imported only where tracing is on."""

import time

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from millrace_common.spans import NO_ATTRIBUTES, Attributes, Span, Tracer, Tracing

EXPORT_TIMEOUT_S = 3
FLUSH_INTERVAL_MS = 1000
W3C = TraceContextTextMapPropagator()


class OtelSpan(Span):
    def __init__(self, span: trace.Span, offset_ns: int) -> None:
        context = span.get_span_context()
        super().__init__(f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}")
        self._span = span
        self._offset_ns = offset_ns

    def event(self, name: str, at: float) -> None:
        self._span.add_event(name, timestamp=self._offset_ns + int(at * 1e9))

    def end(self, at: float, attributes: Attributes = NO_ATTRIBUTES, error: str = "") -> None:
        self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end(self._offset_ns + int(at * 1e9))


class OtelTracer(Tracer):
    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("millrace")
        self._offset_ns = time.time_ns() - time.monotonic_ns()  # of the loop's clock to the calendar

    def begin(
        self, name: str, parent: str, at: float, attributes: Attributes = NO_ATTRIBUTES, server: bool = False
    ) -> Span:
        kind = trace.SpanKind.SERVER if server else trace.SpanKind.INTERNAL
        start = self._offset_ns + int(at * 1e9)
        context = W3C.extract({"traceparent": parent}, Context())  # not the current one, for a trace that begins
        span = self._tracer.start_span(name, context, kind, dict(attributes), start_time=start)
        return OtelSpan(span, self._offset_ns)

    def close(self) -> None:
        self._provider.shutdown()


def provider(config: Tracing, service: str, instance: str) -> TracerProvider:
    resource = Resource.create({"service.name": service, "service.instance.id": instance})
    return TracerProvider(ParentBased(TraceIdRatioBased(config.sample)), resource, shutdown_on_exit=False)


def exporting(config: Tracing, service: str, instance: str) -> OtelTracer:
    made = provider(config, service, instance)
    exporter = OTLPSpanExporter(config.endpoint, timeout=EXPORT_TIMEOUT_S)
    made.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=FLUSH_INTERVAL_MS))
    return OtelTracer(made)
