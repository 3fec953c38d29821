"""The gRPC services of a decode worker, and of a unified one: DecodeService (Link) and KvService (Fetch)."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from millrace.v1 import decode_pb2, decode_pb2_grpc, worker_pb2

from millrace_serve.engine.config import Role
from millrace_serve.engine.core import Route
from millrace_serve.handover.imports import Imports, WholePrompts
from millrace_serve.handover.pairing import Pairs, check_layout
from millrace_serve.handover.role import HandoverRole
from millrace_serve.worker.frontend import convert
from millrace_serve.worker.frontend.frontend import Frontend
from millrace_serve.worker.frontend.links import Links, RouterLink


class DecodeRole(HandoverRole):
    service_names = ("millrace.v1.DecodeService", "millrace.v1.KvService")
    warmup_route = Route.LOCAL

    def __init__(self, frontend: Frontend) -> None:
        super().__init__(frontend, lambda peers, reads: Imports(frontend, peers, reads, WholePrompts(frontend)))
        self._role = frontend.config.role
        self._pairs = Pairs(
            frontend.config, frontend.epoch, frontend.ranks, frontend.requests, self._peers, self.imports
        )
        self._requests.on_abort = self.imports.abort

    @property
    def warmed_sources(self) -> Iterable[str]:
        return self._pairs.warmed

    def register(self, server: grpc.aio.Server, links: Links) -> None:
        super().register(server, links)
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

    async def warm_pair(self, source: worker_pb2.KvSourceRef) -> None:
        if self._role is Role.UNIFIED:
            await super().warm_pair(source)
        await self._pairs.warm_up(source)
