"""The gRPC service of a decode worker, and of a unified one: DecodeService (Link)."""

from __future__ import annotations

import grpc
from millrace.v1 import decode_pb2, decode_pb2_grpc, worker_pb2
from millrace_common.reasons import Reason

from millrace_serve.engine.config import Role
from millrace_serve.engine.core import Events, Failure, RequestId, Route
from millrace_serve.handover.imports import Imports
from millrace_serve.handover.pairing import Pairs, check_layout
from millrace_serve.handover.peers import Peers
from millrace_serve.transfer.messages import DropSource, ReadDone, ReadStuck
from millrace_serve.worker.frontend import convert
from millrace_serve.worker.frontend.frontend import Frontend
from millrace_serve.worker.frontend.links import Links, RouterLink
from millrace_serve.worker.frontend.role import RoleLogic
from millrace_serve.worker.messages import Report

CANCELLED = Failure(Reason.CANCELLED, "the attempt was aborted")


class DecodeRole(RoleLogic):
    service_names = ("millrace.v1.DecodeService",)
    warmup_route = Route.LOCAL

    def __init__(self, frontend: Frontend) -> None:
        config, requests = frontend.config, frontend.requests
        self._role = config.role
        self._ranks = frontend.ranks
        self._requests = requests
        self._peers = Peers(lambda rank, agent: frontend.ranks.send_reader(rank, DropSource(agent)), frontend.identity)
        self.imports = Imports(
            config.limits.page_size,
            config.timeouts.stall,
            frontend.ranks,
            requests,
            self._peers,
            frontend.spans,
            frontend.metrics,
        )
        self._pairs = Pairs(config, frontend.epoch, frontend.ranks, requests, self._peers, self.imports)
        self.warmed_sources = self._pairs.warmed
        requests.on_abort = self._abort

    def register(self, server: grpc.aio.Server, links: Links) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(links, server)

    def submit(self, link: RouterLink, message: decode_pb2.DecodeRequest) -> None:
        if not message.HasField("source"):
            self._requests.submit(message.request, Route.LOCAL, link)
            return
        if self._role is Role.UNIFIED:
            raise convert.invalid("source", "is set, but a unified worker imports nothing")
        check_layout(message.source.fingerprint, message.source.address, self._ranks)
        id = convert.request_id(message.request.id)
        if id in self.imports and id not in self._requests:  # reads of it are still in flight
            raise convert.invalid("id", f"{id} was submitted here before")
        if request := self._requests.submit(message.request, Route.IMPORT, link):
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

    @property
    def busy(self) -> bool:
        return len(self.imports) > 0

    async def warm_pair(self, source: worker_pb2.KvSourceRef) -> None:
        if self._role is Role.UNIFIED:
            await super().warm_pair(source)
        await self._pairs.warm_up(source)

    async def close(self) -> None:
        await self.imports.close()
        await self._peers.close()

    def _abort(self, id: RequestId) -> bool:
        return self.imports.abort(id, CANCELLED)
