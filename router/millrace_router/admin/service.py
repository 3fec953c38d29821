"""The operators' functions of a router: `Admin` serves them over gRPC, admin_http.py over HTTP, on ports of their own.

Everything is idempotent. A call to several workers goes to all of them at once; when some fail, the error names each of
them, and the others have done it. No method looks at its gRPC context.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from millrace.v1 import admin_pb2 as pb
from millrace.v1 import admin_pb2_grpc, worker_pb2
from millrace_common.gc_hooks import ProcessGc
from millrace_common.quoted import cut
from millrace_common.reasons import Reason
from millrace_rpc.client import reply
from millrace_rpc.errors import FieldError, MillraceError

from millrace_router.admin.page import PublicHttp
from millrace_router.admin.traffic import Recent
from millrace_router.fleet.registry import Registry
from millrace_router.fleet.worker import Worker
from millrace_router.policy.choose import Decision

SERVICE = "millrace.v1.Admin"
T = TypeVar("T")


class Admin(admin_pb2_grpc.AdminServicer):
    def __init__(self, registry: Registry, gc: ProcessGc, recent: Recent, public: PublicHttp) -> None:
        self._registry = registry
        self._gc = gc
        self._recent = recent
        self._public = public

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: object = None) -> pb.ListWorkersResponse:
        pairs = [
            pb.PairStatus(
                source=progress.source.address if progress.source else "",
                worker=progress.worker.address,
                state=progress.stage,
                attempts=progress.attempts,
                detail=progress.detail,
            )
            for progress in self._registry.warmups.progress.values()
        ]
        router = pb.RouterStatus(
            ready=self._registry.ready,
            gc_freezes=self._gc.freezes,
            gc_frozen_objects=self._gc.frozen_objects,
            http_port=self._public.port,
            http_tls=self._public.tls,
            recent=self._recent.spans(),
            last_minutes=self._recent.whole(),
        )
        return pb.ListWorkersResponse(workers=self._registry.status(), pairs=pairs, router=router)

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: object = None) -> worker_pb2.DrainResponse:
        worker = self._worker(request.address)
        if not request.timeout_s >= 0:  # the worker would refuse the call after this router has drained it
            raise FieldError("timeout_s", "must be at least 0")
        drain = worker_pb2.DrainRequest(timeout_s=request.timeout_s if request.HasField("timeout_s") else None)
        control = worker.control
        self._registry.drain(worker)
        drained: list[worker_pb2.DrainResponse] = await _each([worker], lambda _: control.Drain(drain))
        return drained[0]

    async def WarmUp(self, request: pb.WarmUpRequest, context: object = None) -> pb.WarmUpResponse:
        return pb.WarmUpResponse(pairs=await self._registry.warmups.rerun(self._registry.workers.values()))

    async def FreezeGcAll(self, request: pb.FreezeGcAllRequest, context: object = None) -> worker_pb2.FreezeGcResponse:
        own = self._gc.freeze()
        freeze = worker_pb2.FreezeGcRequest()
        frozen = await _each(self._reachable(()), lambda worker: worker.control.FreezeGc(freeze))
        return worker_pb2.FreezeGcResponse(
            processes=1 + sum(answer.processes for answer in frozen),
            frozen_objects=own + sum(answer.frozen_objects for answer in frozen),
        )

    async def FlushCaches(
        self, request: pb.FlushCachesRequest, context: object = None
    ) -> worker_pb2.FlushCacheResponse:
        flush = worker_pb2.FlushCacheRequest()
        flushed = await _each(self._reachable(()), lambda worker: worker.control.FlushCache(flush))
        return worker_pb2.FlushCacheResponse(pages=sum(answer.pages for answer in flushed))

    async def StartProfiles(self, request: pb.StartProfilesRequest, context: object = None) -> pb.StartProfilesResponse:
        seconds = request.max_seconds if request.HasField("max_seconds") else None
        start = worker_pb2.StartProfileRequest(max_seconds=seconds)
        workers = self._reachable(request.workers)
        await _each(workers, lambda worker: worker.control.StartProfile(start))
        return pb.StartProfilesResponse(workers=[worker.address for worker in workers])

    async def StopProfiles(self, request: pb.StopProfilesRequest, context: object = None) -> pb.StopProfilesResponse:
        workers, stop = self._reachable(request.workers), worker_pb2.StopProfileRequest()
        answers = await _each(workers, lambda worker: worker.control.StopProfile(stop))
        pairs = zip(workers, answers, strict=True)
        traces = [pb.WorkerTraces(address=worker.address, paths=answer.paths) for worker, answer in pairs]
        return pb.StopProfilesResponse(traces=traces)

    async def ExplainRequest(
        self, request: pb.ExplainRequestRequest, context: object = None
    ) -> pb.ExplainRequestResponse:
        decisions = self._registry.placer.decisions_of(request.request_id)
        if not decisions:
            text = f"there is no placement of request {cut(request.request_id)!r}: ask the other routers"
            raise MillraceError(Reason.NOT_FOUND, text, param="request_id")
        return pb.ExplainRequestResponse(placements=map(_explained, decisions))

    def _worker(self, name: str) -> Worker:
        """The worker with this address, name or key of discovery, or id."""
        for worker in self._registry.workers.values():
            if name and name in (worker.address, worker.target.name, worker.target.key, worker.info.worker_id):
                return worker
        raise MillraceError(Reason.NOT_FOUND, f"there is no worker at {cut(name)!r}", param="address")

    def _reachable(self, names: Iterable[str]) -> list[Worker]:
        """The named workers, in any state; without names, all reachable ones."""
        named = [self._worker(name) for name in names]
        return named or [worker for worker in self._registry.workers.values() if worker.load is not None]


async def _each(workers: list[Worker], call: Callable[[Worker], Awaitable[T]]) -> list[T]:
    """The answers of all workers. Raises if one failed, with the first failure's reason and all messages."""

    async def ask(worker: Worker) -> T:
        return await reply(call(worker))  # without a connection the call itself raises

    tasks = [asyncio.create_task(ask(worker)) for worker in workers]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    failures = [(w.address, e) for w, e in zip(workers, results, strict=True) if isinstance(e, MillraceError)]
    if failures:
        details = "; ".join(f"{address}: {error.message}" for address, error in failures)
        raise MillraceError(failures[0][1].reason, f"{len(failures)} of {len(workers)} workers failed: {details}")
    return [task.result() for task in tasks]


def _explained(decision: Decision) -> pb.PlacementDecision:
    want, found = decision.situation.want, decision.placement.prefix_fetch
    prefix_fetch = found and pb.PrefixFetch(
        address=found.source.address,
        replica=found.source.index,
        num_pages=found.num_pages,
        fetch_seconds=found.fetch_s,
        compute_seconds=found.compute_s,
        taken=found.worthwhile,
    )
    return pb.PlacementDecision(
        attempt=want.attempt,
        route=decision.route,
        prompt_tokens=want.tokens,
        cached_tokens=decision.cached_tokens,
        selections=decision.explain(),
        prefix_fetch=prefix_fetch,
    )
