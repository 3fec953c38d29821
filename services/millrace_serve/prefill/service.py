"""The gRPC services of a prefill worker: PrefillService (Link) and KvService (Fetch)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
from millrace.v1 import kv_pb2, kv_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from millrace_rpc.errors import MillraceError

from millrace_serve.engine.core import Events, FinishReason, KvPart, RequestId, Route
from millrace_serve.handover.exports import Export, Exports
from millrace_serve.handover.pairing import check_layout
from millrace_serve.transfer.lease import Outcome
from millrace_serve.worker.frontend import convert
from millrace_serve.worker.frontend.frontend import Frontend
from millrace_serve.worker.frontend.links import Links, RouterLink, check_epoch, opening
from millrace_serve.worker.frontend.ranks import Ranks
from millrace_serve.worker.frontend.role import RoleLogic

Context: TypeAlias = grpc.aio.ServicerContext


class PrefillRole(RoleLogic):
    service_names = ("millrace.v1.PrefillService", "millrace.v1.KvService")
    warmup_route = Route.EXPORT

    def __init__(self, frontend: Frontend) -> None:
        self._epoch = frontend.epoch
        self._ranks = frontend.ranks
        self._requests = frontend.requests
        self.exports = Exports(frontend.config.timeouts, frontend.metrics, frontend.ranks.send)
        self._requests.on_start = self.exports.expect
        self._requests.on_abort = self.exports.abort

    def register(self, server: grpc.aio.Server, links: Links) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(links, server)
        kv_pb2_grpc.add_KvServiceServicer_to_server(KvServicer(self._epoch, self._ranks, self.exports), server)

    def submit(self, link: RouterLink, message: prefill_pb2.PrefillRequest) -> None:
        id = convert.request_id(message.request.id)
        if id in self.exports and id not in self._requests:
            raise convert.invalid("id", f"{id} was submitted here before")
        self._requests.submit(message.request, Route.EXPORT, link)

    def on_events(self, replica: int, events: Events) -> None:
        for part in events.parts:
            self.exports.publish(replica, part)
        for output in events.outputs:
            if output.finish is FinishReason.ABORT:
                self.exports.abort(output.id)
            elif output.error is not None:
                self.exports.fail(output.id, MillraceError(output.error.reason, output.error.message))

    def on_lost(self, error: MillraceError) -> None:
        self.exports.fail_all(error)

    @property
    def busy(self) -> bool:
        return self.exports.leases.num_live > 0


class KvServicer(kv_pb2_grpc.KvServiceServicer):
    def __init__(self, epoch: str, ranks: Ranks, exports: Exports) -> None:
        self._epoch = epoch
        self._ranks = ranks
        self._exports = exports

    async def Fetch(
        self, requests: AsyncIterator[kv_pb2.FetchRequest], context: Context
    ) -> AsyncIterator[kv_pb2.FetchResponse]:
        begin: kv_pb2.FetchOpen = await opening(requests, "open", "Fetch")
        id = convert.request_id(begin.id)
        check_epoch(begin.epoch, self._epoch)
        check_layout(begin.fingerprint, "the decode worker", self._ranks)
        release = asyncio.create_task(self._release(id, requests))
        # a generator that is suspended in a yield does not notice that its call is over
        context.add_done_callback(lambda _: release.cancel())
        async for item in self._exports.fetch(id):
            if isinstance(item, KvPart):
                yield kv_pb2.FetchResponse(part=convert.wire_part(item))
            elif isinstance(item, Export):
                memory = self._ranks.memory_of(item.replica)
                yield kv_pb2.FetchResponse(source=kv_pb2.KvSource(ranks=map(convert.wire_memory, memory)))
            else:
                yield kv_pb2.FetchResponse(heartbeat=kv_pb2.Heartbeat())
        if release.done() and release.result() is Outcome.HELD:
            yield kv_pb2.FetchResponse(held=kv_pb2.Held())

    async def _release(self, id: RequestId, requests: AsyncIterator[kv_pb2.FetchRequest]) -> Outcome | None:
        """Release the pages at the peer's release, which ends the Fetch. None: the stream ended without it."""
        with contextlib.suppress(grpc.aio.UsageError, grpc.aio.AbortError):  # the stream is over
            async for message in requests:
                if message.HasField("release"):
                    return self._exports.release(id)
        return None
