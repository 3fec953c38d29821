"""The gRPC services of a prefill worker: PrefillService (Link) and KvService (Fetch)."""

from __future__ import annotations

import grpc
from millrace.v1 import prefill_pb2_grpc

from millrace_serve.handover.role import HandoverRole
from millrace_serve.worker.frontend.links import Links


class PrefillRole(HandoverRole):
    service_names = ("millrace.v1.PrefillService", "millrace.v1.KvService")

    def register(self, server: grpc.aio.Server, links: Links) -> None:
        super().register(server, links)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(links, server)
