"""The common part of both roles: every worker serves cached pages, and reads pages of others."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from millrace.v1 import kv_pb2_grpc
from millrace_rpc.access import token

from millrace_serve.engine.core import Events, Failure
from millrace_serve.handover.exports import Exports
from millrace_serve.handover.failed_reads import READER_ALONE, SOURCE_ALONE, FailedReads
from millrace_serve.handover.imports import Imports
from millrace_serve.handover.peers import Peers
from millrace_serve.handover.serving import KvServicer
from millrace_serve.transfer.messages import DropSource, ReadDone, ReadStuck
from millrace_serve.worker.frontend.frontend import Frontend
from millrace_serve.worker.frontend.links import Links
from millrace_serve.worker.frontend.requests import ABORTED
from millrace_serve.worker.frontend.role import RoleLogic


class HandoverRole(RoleLogic):
    def __init__(self, frontend: Frontend, make_imports: Callable[[Peers, FailedReads], Imports]) -> None:
        config, self._ranks, self._requests = frontend.config, frontend.ranks, frontend.requests
        drop_source = lambda rank, agent: frontend.ranks.send_reader(rank, DropSource(agent))  # noqa: E731
        self._peers = Peers(drop_source, frontend.identity, token(frontend.secret))
        own_reads = FailedReads("reads of other workers' KV pages", READER_ALONE, frontend.leave)
        self.imports = make_imports(self._peers, own_reads)
        self.handlers = {ReadDone: self.imports.on_read_done, ReadStuck: self.imports.on_stuck}
        self.exports = Exports(config.timeouts, frontend.metrics, frontend.ranks.send)
        peers_reads = FailedReads("other workers' reads of KV pages here", SOURCE_ALONE, frontend.leave)
        self._kv = KvServicer(frontend, self.exports, peers_reads)

    def register(self, server: grpc.aio.Server, links: Links) -> None:
        kv_pb2_grpc.add_KvServiceServicer_to_server(self._kv, server)

    def on_events(self, replica: int, events: Events) -> None:
        for chunk in events.chunks:
            self.exports.publish(replica, chunk)
        for reserved in events.reserved:
            self.imports.on_reserved(reserved)
        for output in events.outputs:
            if output.finish is not None:  # perhaps before its transfer ended: a deadline, or no room
                self.imports.abort(output.id, ABORTED)

    def on_lost(self, why: Failure) -> None:
        self.exports.fail_all(why)

    @property
    def busy(self) -> bool:
        return self.exports.leases.num_live > 0 or len(self.imports) > 0

    async def disconnect(self) -> None:
        await self._peers.close()

    async def close(self) -> None:
        await self.imports.close()
        await self._peers.close()
