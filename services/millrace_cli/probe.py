"""Short questions to running processes. An answer that does not come is None: processes start, stop and hang while we
ask.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from millrace_rpc.client import channel
from millrace_rpc.tls import Identity

TIMEOUT_S = 2.0


async def is_serving(address: str, identity: Identity | None = None) -> bool | None:
    """The health service's answer for the whole server."""
    async with channel(address, identity) as ch:
        try:
            answer = await health_pb2_grpc.HealthStub(ch).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return None
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def worker_info(address: str, identity: Identity | None = None) -> worker_pb2.WorkerInfo | None:
    async with channel(address, identity) as ch:
        try:
            return await worker_pb2_grpc.WorkerServiceStub(ch).GetInfo(worker_pb2.GetInfoRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return None


async def workers(admin_address: str, identity: Identity | None = None) -> list[admin_pb2.WorkerStatus] | None:
    """A router's view of its workers."""
    async with channel(admin_address, identity) as ch:
        try:
            answer = await admin_pb2_grpc.AdminStub(ch).ListWorkers(admin_pb2.ListWorkersRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return None
    return list(answer.workers)


def state_name(state: int) -> str:
    """WORKER_STATE_LOADING → "loading"."""
    return worker_pb2.WorkerState.Name(state).removeprefix("WORKER_STATE_").lower()
