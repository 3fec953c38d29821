"""The gRPC services of a decode, unified or flexible worker: DecodeService (Link) and KvService (Fetch)."""

from __future__ import annotations

import grpc
from millrace.v1 import decode_pb2_grpc

from millrace_serve.handover.role import HandoverRole
from millrace_serve.worker.frontend.links import Links


class DecodeRole(HandoverRole):
    service_names = ("millrace.v1.DecodeService", "millrace.v1.KvService")

    def register(self, server: grpc.aio.Server, links: Links) -> None:
        super().register(server, links)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(links, server)
