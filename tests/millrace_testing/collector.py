"""A receiver of OTLP spans from other processes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc

from millrace_testing import HANG_S


@dataclass(frozen=True)
class Seen:
    service: str
    name: str
    trace: str
    id: str
    parent: str
    start: int  # ns
    end: int
    attributes: dict[str, object]
    error: str


class Collector(pb_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.endpoint = ""

    async def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.aio.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            for scope in resource.scope_spans:
                self.spans += (_seen(service, span) for span in scope.spans)
        return pb.ExportTraceServiceResponse()

    async def until(self, names: set[tuple[str, str]], trace: str, seconds: float = HANG_S) -> list[Seen]:
        """The spans of a trace, once (service, name) of all of these have come."""
        async with asyncio.timeout(seconds):
            while True:
                found = [span for span in self.spans if span.trace == trace]
                if names <= {(span.service, span.name) for span in found}:
                    return found
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    server, collector = grpc.aio.server(), Collector()
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield collector
    await server.stop(0)


def _seen(service: str, span: object) -> Seen:
    values = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    return Seen(
        service, span.name, *ids, span.start_time_unix_nano, span.end_time_unix_nano, values, span.status.message
    )
