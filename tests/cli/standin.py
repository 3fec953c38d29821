"""A tiny router or worker for tests of the supervisor: `standin.py ROLE --announce FILE --set KEY=VALUE …`.

A worker is ready at once. A router calls a worker routable while it answers. Keys of `--set` change that:
`die=SECONDS` exits after saying why, `deaf=true` ignores SIGTERM and has a child of its own, `never=true` is not ready.

It imports little: many are started.
"""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from millrace.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, ready: bool) -> None:
        self.state = worker_pb2.WORKER_STATE_READY if ready else worker_pb2.WORKER_STATE_LOADING

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo(state=self.state, state_message="layer 1 of 2")


class Admin(admin_pb2_grpc.AdminServicer):
    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListWorkersResponse:
        workers = [admin_pb2.WorkerStatus(address=it, routable=await _is_ready(it)) for it in self.addresses]
        return admin_pb2.ListWorkersResponse(workers=workers)


async def _is_ready(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            info = await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=2)
        except grpc.aio.AioRpcError:
            return False
    return info.state == worker_pb2.WORKER_STATE_READY


async def main(role: str, announce: Path, settings: dict[str, object]) -> None:
    sys.stderr.write(f"standin: {role}\n")
    server, serving = grpc.aio.server(options=[("grpc.so_reuseport", 0)]), health.aio.HealthServicer()
    await serving.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(serving, server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(not settings.get("never")), server)
    if role == "router":
        admin_pb2_grpc.add_AdminServicer_to_server(Admin(settings["workers"]), server)
    address = settings["grpc"] if role == "router" else f"127.0.0.1:{settings['grpc_port']}"
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        sys.exit(f"cannot listen on {address}")
    await server.start()
    told = int(settings.get("admin_http", "").rpartition(":")[2] or 0)  # nothing listens there
    announce.write_text(json.dumps({"grpc": port, "admin": port, "http": port, "admin_http": told or port}))
    stopped = asyncio.Event()
    if settings.get("deaf"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        announce.with_suffix(".child").write_text(str(child.pid))
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, lambda: None if settings.get("deaf") else stopped.set()
    )
    if "die" in settings:
        await asyncio.sleep(float(settings["die"]))
        await server.stop(0)
        sys.exit("standin: no such checkpoint")
    await stopped.wait()
    await server.stop(0)


if __name__ == "__main__":
    arguments = sys.argv[2:]
    items = [arguments[i + 1].partition("=") for i, argument in enumerate(arguments) if argument == "--set"]
    announce_path = Path(arguments[arguments.index("--announce") + 1])
    asyncio.run(main(sys.argv[1], announce_path, {key: yaml.safe_load(value) for key, _, value in items}))
