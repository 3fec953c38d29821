"""The gRPC service of a decode worker, and of a unified one: DecodeService (Link)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from millrace.v1 import decode_pb2, decode_pb2_grpc, worker_pb2
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_serve.engine.config import Role
from millrace_serve.engine.core import Events, Failure, Request, RequestId, Route
from millrace_serve.handover import pairing
from millrace_serve.handover.imports import Imports
from millrace_serve.transfer.messages import ReadDone, ReadStuck
from millrace_serve.worker.frontend import convert
from millrace_serve.worker.frontend.frontend import Frontend
from millrace_serve.worker.frontend.links import Link
from millrace_serve.worker.frontend.role import RoleLogic
from millrace_serve.worker.frontend.warmup import Waiter
from millrace_serve.worker.messages import Report

CANCELLED = Failure(Reason.CANCELLED, "the attempt was aborted")


class DecodeRole(RoleLogic):
    service_names = ("millrace.v1.DecodeService",)
    warmup_route = Route.LOCAL

    def __init__(self, frontend: Frontend) -> None:
        super().__init__(frontend)
        self.imports = Imports(frontend)

    @property
    def fingerprint(self) -> str:
        info = self.frontend.ranks.info
        if info is None:
            raise MillraceError(Reason.NOT_READY, "the ranks are not up yet")
        return info.layout.fingerprint

    def register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(self.frontend), server)

    def submit(self, link: Link, message: decode_pb2.DecodeRequest) -> None:
        if not message.HasField("source"):
            self.frontend.submit(message.request, Route.LOCAL, link)
            return
        if self.frontend.config.role is Role.UNIFIED:
            raise convert.invalid("source", "is set, but a unified worker imports nothing")
        if message.source.fingerprint != self.fingerprint:
            text = f"KV layout {message.source.fingerprint} of {message.source.address} is not ours, {self.fingerprint}"
            raise MillraceError(Reason.LAYOUT_MISMATCH, text)
        id = convert.request_id(message.request.id)
        if id in self.imports and id not in self.frontend.attempts:  # reads of it are still in flight
            raise convert.invalid("id", f"{id} was submitted here before")
        if request := self.frontend.submit(message.request, Route.IMPORT, link):
            self.imports.start(request, message.request.replica, message.source)

    def on_events(self, replica: int, events: Events) -> None:
        for reserved in events.reserved:
            self.imports.on_reserved(reserved)
        for output in events.outputs:
            if output.finish is not None:  # perhaps before its import ended: a deadline, or no room
                self.imports.abort(output.id, CANCELLED)

    def on_report(self, rank: int, report: Report) -> None:
        match report:
            case ReadDone():
                self.imports.on_read_done(rank, report)
            case ReadStuck():
                self.imports.on_stuck(report)
            case _:
                super().on_report(rank, report)

    def abort(self, id: RequestId) -> bool:
        return self.imports.abort(id, CANCELLED)

    def on_lost(self, error: MillraceError) -> None:
        """Nobody waits for imports but our own engines."""

    @property
    def busy(self) -> bool:
        return len(self.imports) > 0

    async def run_import(self, request: Request, replica: int, source: worker_pb2.KvSourceRef) -> None:
        """A request of our own. Raises MillraceError when it fails."""
        waiter = Waiter(request.route)
        self.frontend.start_attempt(request, replica, waiter)
        self.imports.start(request, replica, source)
        try:
            await waiter.wait()
        finally:
            if request.id in self.frontend.attempts:
                self.frontend.abort(request.id, "the warm-up is over")

    async def warm_pair(self, source: worker_pb2.KvSourceRef) -> None:
        if self.frontend.config.role is Role.UNIFIED:
            await super().warm_pair(source)
        await pairing.warm_pair(self, source)

    async def close(self) -> None:
        await self.imports.close()


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def Link(
        self, requests: AsyncIterator[decode_pb2.DecodeLinkRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.LinkResponse]:
        async for response in self._frontend.links.serve(requests, context):
            yield response
