"""WorkerService: the control side of a worker of any role."""

import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TypeAlias

import grpc
from millrace.v1 import worker_pb2 as pb
from millrace.v1 import worker_pb2_grpc
from millrace_common.versions import WORKER_API
from millrace_rpc.errors import FieldError

from millrace_serve.engine.config import Role
from millrace_serve.worker.frontend import convert
from millrace_serve.worker.frontend.frontend import STATES, Frontend
from millrace_serve.worker.frontend.lifecycle import State
from millrace_serve.worker.frontend.weights import HotWeights

MIN_INTERVAL_S = 0.05
MAX_INTERVAL_S = 1.0
DUTIES = {value: name for name, value in pb.Duty.items() if value != pb.DUTY_UNSPECIFIED}
SERVICE_NAME = "millrace.v1.WorkerService"

log = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, frontend: Frontend) -> None:
        self._frontend, self._weights = frontend, HotWeights(frontend)

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.WorkerInfo:
        frontend = self._frontend
        config, info = frontend.config, frontend.ranks.info
        wire = pb.WorkerInfo(
            packed_prompts=True,
            prefix_cache=config.limits.prefix_cache,
            worker_id=config.worker_id or frontend.epoch,
            epoch=frontend.epoch,
            role=pb.Role.Value(f"ROLE_{config.role.name}"),
            state=STATES[frontend.lifecycle.state],
            state_message=frontend.lifecycle.message,
            model=config.model_name,
            replicas=config.dp,
            tp=config.tp,
            gc_freezes=frontend.gc.freezes,
            warmed_sources=frontend.role.warmed_sources,
            protocol=WORKER_API,
            startup_seconds=frontend.startup_seconds,
            weights_version=frontend.weights_version,
        )
        if info is not None:
            wire.max_context = info.max_context
            wire.vocab_size = info.vocab_size
            wire.eos_token_ids.extend(info.eos_token_ids)
            wire.layout.CopyFrom(convert.wire_layout(info.layout))
        return wire

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Context) -> AsyncIterator[pb.LoadSnapshot]:
        low = request.min_interval_ms / 1000 or MIN_INTERVAL_S
        high = request.max_interval_ms / 1000 or MAX_INTERVAL_S
        async for snapshot in self._frontend.board.watch(low, max(low, high)):
            yield snapshot

    async def WatchCache(self, request: pb.WatchCacheRequest, context: Context) -> AsyncIterator[pb.CacheChanges]:
        async for changes in self._frontend.caches.watch(request.min_interval_ms / 1000 or MIN_INTERVAL_S):
            yield changes

    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        started = time.monotonic()
        if self._frontend.lifecycle.state not in (State.WARMING, State.READY):
            self._frontend.requests.check_admission()
        if request.HasField("source"):
            await self._frontend.role.warm_pair(request.source)
        else:
            await self._frontend.warm_up()
        return pb.WarmupResponse(seconds=time.monotonic() - started)

    async def FreezeGc(self, request: pb.FreezeGcRequest, context: Context) -> pb.FreezeGcResponse:
        self._frontend.ranks.ready_info  # noqa: B018
        processes, objects = await self._frontend.freeze_gc()
        return pb.FreezeGcResponse(processes=processes, frozen_objects=objects)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        default = self._frontend.config.timeouts.drain
        timeout_s = request.timeout_s if request.HasField("timeout_s") else default
        if not timeout_s >= 0:
            raise FieldError("timeout_s", f"is {timeout_s}; it must be at least 0")
        return pb.DrainResponse(aborted=await self._frontend.drain(timeout_s))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return pb.AbortResponse(found=self._frontend.requests.abort(convert.request_id(request.id), request.reason))

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        self._frontend.ranks.ready_info  # noqa: B018
        return pb.FlushCacheResponse(pages=await self._frontend.flush_cache())

    async def SetWeights(self, request: pb.SetWeightsRequest, context: Context) -> pb.SetWeightsResponse:
        started, weights = time.monotonic(), self._weights
        actions: dict[int, Callable[[], Coroutine[None, None, None]]] = {
            pb.WEIGHTS_ACTION_PAUSE: lambda: weights.pause(request.drop),
            pb.WEIGHTS_ACTION_LOAD: lambda: weights.load(request.path, request.version),
            pb.WEIGHTS_ACTION_RESUME: weights.resume,
            pb.WEIGHTS_ACTION_SLEEP: weights.sleep,
            pb.WEIGHTS_ACTION_WAKE: lambda: weights.wake(request.path, request.version),
        }
        if request.action not in actions:
            raise FieldError("action", "must be one of WeightsAction")
        await weights.to_the_end(actions[request.action]())
        return pb.SetWeightsResponse(version=self._frontend.weights_version, seconds=time.monotonic() - started)

    async def SetDuty(self, request: pb.SetDutyRequest, context: Context) -> pb.SetDutyResponse:
        if (role := self._frontend.config.role) is not Role.FLEXIBLE:
            raise FieldError("duty", f"is for flexible workers; this is a {role} worker")
        if request.duty not in DUTIES:
            raise FieldError("duty", f"must be one of {', '.join(DUTIES.values())}")
        log.info("%s by router %s: %s", DUTIES[request.duty], request.router_id, request.why)
        self._frontend.board.give(request.duty)
        return pb.SetDutyResponse()

    async def StartProfile(self, request: pb.StartProfileRequest, context: Context) -> pb.StartProfileResponse:
        self._frontend.ranks.ready_info  # noqa: B018
        max_seconds = request.max_seconds if request.HasField("max_seconds") else None
        return pb.StartProfileResponse(folder=str(await self._frontend.profiling.start(max_seconds)))

    async def StopProfile(self, request: pb.StopProfileRequest, context: Context) -> pb.StopProfileResponse:
        self._frontend.ranks.ready_info  # noqa: B018
        return pb.StopProfileResponse(paths=await self._frontend.profiling.stop())
