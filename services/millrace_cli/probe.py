"""Short queries to running processes. A missing answer is None, because processes start, stop and hang at any time."""

import contextlib

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from millrace_rpc.client import channel
from millrace_rpc.tls import Identity

TIMEOUT_S = 2.0


async def is_serving(address: str, identity: Identity | None = None) -> bool:
    """The health service's answer for the whole server."""
    with contextlib.suppress(grpc.RpcError):
        async with channel(address, identity) as ch:
            answer = await health_pb2_grpc.HealthStub(ch).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            return answer.status == health_pb2.HealthCheckResponse.SERVING
    return False


async def listed(admin_address: str, identity: Identity | None, token: str) -> list[admin_pb2.WorkerStatus]:
    """A router's view of its workers. Raises RpcError when the admin service does not answer."""
    async with channel(admin_address, identity, token) as ch:
        request = admin_pb2.ListWorkersRequest()
        answer = await admin_pb2_grpc.AdminStub(ch).ListWorkers(request, timeout=TIMEOUT_S)
        return list(answer.workers)


async def misdirected(address: str, error: BaseException | None, wanted: str) -> str:
    """Say that a gRPC call failed because the address has another port than `wanted`; empty where it has not."""
    code = error.code() if isinstance(error, grpc.RpcError) else None
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"{address} is another gRPC port; this command asks {wanted}"
    if code is grpc.StatusCode.UNAVAILABLE and await speaks_http(address):
        return f"{address} speaks HTTP; this command asks {wanted}, which speaks gRPC"
    return ""


async def speaks_http(address: str) -> bool:
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
            await client.get(f"http://{address}/health")
            return True
    return False


async def worker_info(address: str, identity: Identity | None = None, token: str = "") -> worker_pb2.WorkerInfo | None:
    with contextlib.suppress(grpc.RpcError):
        async with channel(address, identity, token) as ch:
            return await worker_pb2_grpc.WorkerServiceStub(ch).GetInfo(worker_pb2.GetInfoRequest(), timeout=TIMEOUT_S)
    return None


async def workers(admin_address: str, identity: Identity | None = None) -> list[admin_pb2.WorkerStatus] | None:
    with contextlib.suppress(grpc.RpcError):
        return await listed(admin_address, identity, "")
    return None
