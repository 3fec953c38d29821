"""grpc.health.v1. Our own implementation, because grpcio-health-checking drops every watcher of a service as soon as
one of them leaves, and a dropped client goes on sending to a draining router.
"""

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc
from millrace_common.quoted import cut

SERVING = pb.HealthCheckResponse.SERVING
NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING
UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # its package has no types
    """Call on the event loop only."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}  # by service
        self._changed = asyncio.Event()  # a new one after each change

    def set(self, services: Iterable[str], status: int) -> None:
        self._statuses.update(dict.fromkeys(services, status))
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext) -> pb.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {cut(request.service)!r}")
        return pb.HealthCheckResponse(status=status)

    async def Watch(self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """Yields the status now and after each change; a slow client may miss a change that is reverted."""
        told = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, UNKNOWN)
            if status == told:
                await changed.wait()
            else:
                told = status
                await context.write(pb.HealthCheckResponse(status=status))
