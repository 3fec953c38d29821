"""The gRPC services of a prefill worker: PrefillService (Link) and KvService (Fetch)."""

from __future__ import annotations

import grpc
from millrace.v1 import prefill_pb2, prefill_pb2_grpc

from millrace_serve.engine.core import Events, Failure, RequestId, Route
from millrace_serve.handover.failed_reads import FailedReads
from millrace_serve.handover.imports import Imports
from millrace_serve.handover.peers import Peers
from millrace_serve.handover.prefix_fetches import PrefixFetches
from millrace_serve.handover.role import HandoverRole
from millrace_serve.worker.frontend import convert
from millrace_serve.worker.frontend.frontend import Frontend
from millrace_serve.worker.frontend.links import Links, RouterLink


class PrefillRole(HandoverRole):
    service_names = ("millrace.v1.PrefillService", "millrace.v1.KvService")
    warmup_route = Route.EXPORT

    def __init__(self, frontend: Frontend) -> None:
        def make_imports(peers: Peers, failed_reads: FailedReads) -> Imports:
            self._prefix_fetches = PrefixFetches(frontend, peers, failed_reads)
            return self._prefix_fetches.imports

        super().__init__(frontend, make_imports)
        self._requests.on_start = self.exports.expect
        self._requests.on_abort = self._abort

    def register(self, server: grpc.aio.Server, links: Links) -> None:
        super().register(server, links)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(links, server)

    def submit(self, link: RouterLink, message: prefill_pb2.PrefillRequest) -> None:
        id = convert.request_id(message.request.id)
        if (id in self.exports or id in self.imports) and id not in self._requests:
            raise convert.invalid("id", f"{id} was submitted here before")
        prefix_fetch = self._prefix_fetches.prepare(message)
        request = self._requests.submit(message.request, Route.EXPORT, link, fetches_prefix=prefix_fetch is not None)
        if request is not None and prefix_fetch is not None:
            self._prefix_fetches.begin_fetch(prefix_fetch)

    def on_events(self, replica: int, events: Events) -> None:
        super().on_events(replica, events)
        for output in events.outputs:
            if output.error is not None:
                self.exports.fail(output.id, output.error)

    def _abort(self, id: RequestId, why: Failure) -> bool:
        fetched = self.imports.abort(id, why)
        return self.exports.fail(id, why) or fetched
