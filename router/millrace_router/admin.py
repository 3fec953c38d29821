"""millrace.v1.Admin: operators' view of the workers, on its own port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from millrace.v1 import admin_pb2, admin_pb2_grpc, worker_pb2
from millrace_rpc.errors import MillraceError, Reason, from_rpc_error

from millrace_router.registry import Registry
from millrace_router.worker import Worker

SERVICE = "millrace.v1.Admin"


class AdminService(admin_pb2_grpc.AdminServicer):
    def __init__(self, registry: Registry, freeze_own_gc: Callable[[], int]) -> None:
        self._registry = registry
        self._freeze_own_gc = freeze_own_gc

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListWorkersResponse:
        return admin_pb2.ListWorkersResponse(workers=self._registry.status())

    async def DrainWorker(
        self, request: admin_pb2.DrainWorkerRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.DrainResponse:
        worker = self._registry.workers.get(request.address)
        if worker is None:
            raise MillraceError(Reason.NOT_FOUND, f"no worker at {request.address!r}", param="address")
        drain = worker_pb2.DrainRequest()
        if request.HasField("timeout_s"):
            drain.timeout_s = request.timeout_s
        control = worker.control
        self._registry.drain(worker)
        return await _answer(control.Drain(drain))

    async def WarmUp(
        self, request: admin_pb2.WarmUpRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.WarmUpResponse:
        return admin_pb2.WarmUpResponse(pairs=await self._registry.hooks.rerun(self._registry.workers.values()))

    async def FreezeGcAll(
        self, request: admin_pb2.FreezeGcAllRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.FreezeGcResponse:
        frozen = await self._each(lambda worker: worker.control.FreezeGc(worker_pb2.FreezeGcRequest()))
        return worker_pb2.FreezeGcResponse(
            processes=1 + sum(answer.processes for answer in frozen),
            frozen_objects=self._freeze_own_gc() + sum(answer.frozen_objects for answer in frozen),
        )

    async def FlushCaches(
        self, request: admin_pb2.FlushCachesRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.FlushCacheResponse:
        flushed = await self._each(lambda worker: worker.control.FlushCache(worker_pb2.FlushCacheRequest()))
        return worker_pb2.FlushCacheResponse(pages=sum(answer.pages for answer in flushed))

    async def _each(self, call: Callable[[Worker], Awaitable[Any]]) -> list[Any]:
        """The answers of all reachable workers, asked one after the other."""
        workers: Iterable[Worker] = [w for w in self._registry.workers.values() if w.load is not None]
        return [await _answer(call(worker)) for worker in workers]


async def _answer(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
