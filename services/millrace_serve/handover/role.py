"""What workers of all roles do: a request's route, its pages for other workers, and pages of others for it."""

from collections.abc import Iterable

import grpc
from millrace.v1 import decode_pb2, decode_pb2_grpc, kv_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2
from millrace_rpc.access import token
from millrace_rpc.errors import FieldError

from millrace_serve.engine.config import Role
from millrace_serve.engine.core import Events, Failure, Request, RequestId, Route
from millrace_serve.handover.exports import Exports
from millrace_serve.handover.failed_reads import READER_ALONE, SOURCE_ALONE, FailedReads
from millrace_serve.handover.imports import Imports
from millrace_serve.handover.pairing import Pairs, check_layout
from millrace_serve.handover.peers import Peers
from millrace_serve.handover.prefix_fetches import PrefixFetches
from millrace_serve.handover.serving import KvServicer
from millrace_serve.transfer.messages import DropSource, ReadDone, ReadStuck
from millrace_serve.worker.frontend import convert
from millrace_serve.worker.frontend.frontend import Frontend
from millrace_serve.worker.frontend.links import Links, RouterLink
from millrace_serve.worker.frontend.requests import ABORTED
from millrace_serve.worker.frontend.role import RoleLogic


class HandoverRole(RoleLogic):
    def __init__(self, frontend: Frontend) -> None:
        config, self._ranks, self._requests = frontend.config, frontend.ranks, frontend.requests
        self._role = config.role
        kind = "Prefill" if config.role is Role.PREFILL else "Decode"
        self.service_names = (f"millrace.v1.{kind}Service", "millrace.v1.KvService")
        drop_source = lambda rank, agent: frontend.ranks.send_reader(rank, DropSource(agent))  # noqa: E731
        self._peers = Peers(drop_source, frontend.identity, token(frontend.secret))
        own_reads = FailedReads("reads of other workers' KV pages", READER_ALONE, frontend.leave)
        self.imports = Imports(frontend, self._peers, own_reads)
        self._prefix_fetches = PrefixFetches(frontend, self._peers, self.imports)
        self.handlers = {ReadDone: self.imports.on_read_done, ReadStuck: self.imports.on_stuck}
        self.exports = Exports(config.timeouts, frontend.metrics, frontend.ranks.send)
        peers_reads = FailedReads("other workers' reads of KV pages here", SOURCE_ALONE, frontend.leave)
        self._kv = KvServicer(frontend, self.exports, peers_reads)
        self._pairs = Pairs(config, frontend.ranks, frontend.requests, self._peers, self.imports)
        self._requests.on_start, self._requests.on_abort = self._on_start, self._on_abort

    def register(self, server: grpc.aio.Server, links: Links) -> None:
        if self._role is Role.PREFILL:
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(links, server)
        else:
            decode_pb2_grpc.add_DecodeServiceServicer_to_server(links, server)
        kv_pb2_grpc.add_KvServiceServicer_to_server(self._kv, server)

    def submit(self, link: RouterLink, message: prefill_pb2.PrefillRequest | decode_pb2.DecodeRequest) -> None:
        """The engine refuses a route that its role does not serve."""
        if isinstance(message, prefill_pb2.PrefillRequest):
            self._submit_export(link, message)
        elif message.HasField("source"):
            self._submit_import(link, message)
        else:
            self._requests.submit(message.request, Route.LOCAL, link)

    def _submit_export(self, link: RouterLink, message: prefill_pb2.PrefillRequest) -> None:
        self._check_new(message.request)
        prefix_fetch = self._prefix_fetches.prepare(message)
        request = self._requests.submit(message.request, Route.EXPORT, link, fetches_prefix=prefix_fetch is not None)
        if request is not None and prefix_fetch is not None:
            self._prefix_fetches.begin_fetch(prefix_fetch)

    def _submit_import(self, link: RouterLink, message: decode_pb2.DecodeRequest) -> None:
        if Route.IMPORT not in self._role.routes:
            raise FieldError("source", f"is set, but a {self._role} worker imports nothing")
        check_layout(message.source.fingerprint, message.source.address, self._ranks)
        self._check_new(message.request)
        if request := self._requests.submit(message.request, Route.IMPORT, link):
            self.imports.start(request, message.request.replica, message.source)

    def _check_new(self, wire: worker_pb2.EngineRequest) -> None:
        """Raises MillraceError for an attempt that is over but whose pages are still read, here or elsewhere."""
        id = convert.request_id(wire.id)
        if (id in self.exports or id in self.imports) and id not in self._requests:
            raise FieldError("id", f"{id} was submitted here before")

    def _on_start(self, request: Request, replica: int) -> None:
        if request.route is Route.EXPORT:
            self.exports.expect(request.id, replica)

    def _on_abort(self, id: RequestId, why: Failure) -> bool:
        imported = self.imports.abort(id, why)
        return self.exports.fail(id, why) or imported

    def on_events(self, replica: int, events: Events) -> None:
        for chunk in events.chunks:
            self.exports.publish(replica, chunk)
        for reserved in events.reserved:
            self.imports.on_reserved(reserved)
        for output in events.outputs:
            if output.finish is not None:  # perhaps before its transfer ended: a deadline, or no room
                self.imports.abort(output.id, ABORTED)
            if output.error is not None:
                self.exports.fail(output.id, output.error)

    def on_lost(self, why: Failure) -> None:
        self.exports.fail_all(why)

    @property
    def busy(self) -> bool:
        return self.exports.leases.num_live > 0 or len(self.imports) > 0

    @property
    def warmup_routes(self) -> Iterable[Route]:
        return [route for route in self._role.routes if route is not Route.IMPORT]

    @property
    def warmed_sources(self) -> Iterable[str]:
        return self._pairs.warmed

    async def warm_pair(self, source: worker_pb2.KvSourceRef) -> None:
        if Route.IMPORT not in self._role.routes:
            raise FieldError("source", f"is set, but a {self._role} worker imports nothing")
        await self._pairs.warm_up(source)

    async def disconnect(self) -> None:
        await self._peers.close()

    async def close(self) -> None:
        await self.imports.close()
        await self._peers.close()
