"""The gRPC services of a prefill worker: PrefillService (Link) and KvService (Fetch)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
from millrace.v1 import kv_pb2, kv_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_serve.engine.core import Events, FinishReason, KvPart, Request, RequestId, Route
from millrace_serve.handover.exports import Export, Exports
from millrace_serve.transfer.lease import Outcome
from millrace_serve.worker.frontend import convert
from millrace_serve.worker.frontend.frontend import Frontend
from millrace_serve.worker.frontend.links import Link, check_epoch
from millrace_serve.worker.frontend.role import RoleLogic

Context: TypeAlias = grpc.aio.ServicerContext


class PrefillRole(RoleLogic):
    service_names = ("millrace.v1.PrefillService", "millrace.v1.KvService")
    warmup_route = Route.EXPORT

    def __init__(self, frontend: Frontend) -> None:
        super().__init__(frontend)
        self.exports = Exports(frontend.config.timeouts, frontend.metrics, frontend.ranks.send)

    def register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(self.frontend), server)
        kv_pb2_grpc.add_KvServiceServicer_to_server(KvServicer(self), server)

    def submit(self, link: Link, message: prefill_pb2.PrefillRequest) -> None:
        id = convert.request_id(message.request.id)
        if id in self.exports and id not in self.frontend.attempts:
            raise convert.invalid("id", f"{id} was submitted here before")
        self.frontend.submit(message.request, Route.EXPORT, link)

    def on_start(self, request: Request, replica: int) -> None:
        self.exports.expect(request.id, replica)

    def on_events(self, replica: int, events: Events) -> None:
        for part in events.parts:
            self.exports.publish(replica, part)
        for output in events.outputs:
            if output.finish is FinishReason.ABORT:
                self.exports.abort(output.id)
            elif output.error is not None:
                self.exports.fail(output.id, MillraceError(output.error.reason, output.error.message))

    def abort(self, id: RequestId) -> bool:
        return self.exports.abort(id)

    def on_lost(self, error: MillraceError) -> None:
        self.exports.fail_all(error)

    @property
    def busy(self) -> bool:
        return self.exports.leases.num_live > 0


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def Link(
        self, requests: AsyncIterator[prefill_pb2.PrefillLinkRequest], context: Context
    ) -> AsyncIterator[worker_pb2.LinkResponse]:
        async for response in self._frontend.links.serve(requests, context):
            yield response


class KvServicer(kv_pb2_grpc.KvServiceServicer):
    def __init__(self, role: PrefillRole) -> None:
        self._role = role
        self._frontend = role.frontend

    async def Fetch(
        self, requests: AsyncIterator[kv_pb2.FetchRequest], context: Context
    ) -> AsyncIterator[kv_pb2.FetchResponse]:
        opening = await _opening(requests)
        id = convert.request_id(opening.id)
        check_epoch(opening.epoch, self._frontend.epoch)
        self._check_layout(opening.fingerprint)
        release = asyncio.create_task(self._release(id, requests))
        # a generator that is suspended in a yield does not notice that its call is over
        context.add_done_callback(lambda _: release.cancel())
        async for item in self._role.exports.fetch(id):
            if isinstance(item, KvPart):
                yield kv_pb2.FetchResponse(part=convert.wire_part(item))
            elif isinstance(item, Export):
                memory = self._frontend.ranks.memory_of(item.replica)
                yield kv_pb2.FetchResponse(source=kv_pb2.KvSource(ranks=map(convert.wire_memory, memory)))
            else:
                yield kv_pb2.FetchResponse(heartbeat=kv_pb2.Heartbeat())
        if release.done() and release.result() is Outcome.HELD:
            yield kv_pb2.FetchResponse(held=kv_pb2.Held())

    async def _release(self, id: RequestId, requests: AsyncIterator[kv_pb2.FetchRequest]) -> Outcome | None:
        """When the reader asks for it, which ends what it fetches. None: it never did."""
        with contextlib.suppress(grpc.aio.UsageError, grpc.aio.AbortError):  # the stream is over
            async for message in requests:
                if message.HasField("release"):
                    return self._role.exports.release(id)
        return None

    def _check_layout(self, theirs: str) -> None:
        info = self._frontend.ranks.info
        if info is None:
            raise MillraceError(Reason.NOT_READY, "the ranks are not up yet")
        ours = info.layout.fingerprint
        if theirs != ours:
            message = f"KV layout {theirs or '(empty)'} of the decode worker is not ours, {ours}"
            raise MillraceError(Reason.LAYOUT_MISMATCH, message)


async def _opening(requests: AsyncIterator[kv_pb2.FetchRequest]) -> kv_pb2.FetchOpen:
    async for message in requests:
        if message.HasField("open"):
            return message.open
        break
    raise MillraceError(Reason.INVALID_ARGUMENT, "the first message of a Fetch must be open")
