"""A worker process from its start to its exit code.

1. the gRPC server answers, the ports are announced, signals are caught
2. the frontend starts its ranks and warms up: READY
3. until SIGTERM or SIGINT: drain, then exit code 0; a second signal ends the process at once
   until the worker finds that it cannot serve: drain, then exit code 1
   until a rank dies: exit code 1
   a start that fails: exit code 1, with the reason in the log and in GetInfo's state_message until the end; exit code
   2 where the settings or the checkpoint are at fault, so that another start would end alike
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path

import prometheus_client
from millrace.v1 import worker_pb2_grpc
from millrace_common import log as logs
from millrace_common.config import ConfigError, load
from millrace_rpc.access import Access
from millrace_rpc.errors import MillraceError
from millrace_rpc.http_connection import ConnectionLimits
from millrace_rpc.http_server import HttpServer
from millrace_rpc.server import Server, announce, run
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from millrace_serve.engine.config import Role
from millrace_serve.plan import report
from millrace_serve.plan.facts import gpu_here, memory_limit
from millrace_serve.plan.settings import decide
from millrace_serve.worker import caches
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.frontend.frontend import Frontend
from millrace_serve.worker.frontend.lifecycle import State
from millrace_serve.worker.frontend.role import RoleLogic
from millrace_serve.worker.frontend.service import SERVICE_NAME, WorkerServicer
from millrace_serve.worker.launch import make_launcher

log = logging.getLogger(__name__)

STOP_GRACE_S = 1.0  # for streams to take their last messages
MakeRole = Callable[[Frontend], RoleLogic]


async def serve(config: WorkerConfig, make_role: MakeRole, announced: Path | None) -> int:
    """Run a worker; its exit code."""
    frontend = Frontend(config, uuid.uuid4().hex, make_launcher(config.launcher), make_role)
    server = _server(frontend)
    http = HttpServer(_probes(frontend), ConnectionLimits(config.timeouts.idle))
    stop = _signals()
    ports: dict[str, int] = {}
    code, message = 1, "could not start"
    try:
        if config.health_port is not None:
            ports["health"] = await server.start_health(f"{config.host}:{config.health_port}")
        ports["grpc"] = await server.start(f"{config.host}:{config.grpc_port}", frontend.identity)
        ports["metrics"] = http.start(f"{config.host}:{config.metrics_port}")
        if announced is not None:
            announce(announced, {**ports, "epoch": frontend.epoch})
        code, message = await _live(frontend, stop, f"{config.host}:{ports['grpc']}")
        log.info("stopping: %s", message)
    finally:
        await frontend.close(message)
        await server.stop(STOP_GRACE_S)
        await http.stop()
    return code


async def _live(frontend: Frontend, stop: asyncio.Event, address: str) -> tuple[int, str]:
    """Wait until the worker should end. Returns the exit code and the reason."""
    stopped = asyncio.create_task(stop.wait())
    start = asyncio.create_task(frontend.start())
    await asyncio.wait((start, stopped, frontend.lost), return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        start.cancel()
        if frontend.lost.done():  # perhaps between two warm-up requests: the next one would never be answered
            return frontend.ranks.exit_code, f"could not start: {frontend.lost.result()}"
        return 0, "stopped by a signal before it was ready"
    try:
        await start
    except (MillraceError, OSError) as error:
        return frontend.ranks.exit_code, f"could not start: {error}"
    log.info("READY %s", address)
    await asyncio.wait((stopped, frontend.leaving, frontend.lost), return_when=asyncio.FIRST_COMPLETED)
    if not frontend.lost.done():
        drain = asyncio.create_task(frontend.drain(frontend.config.timeouts.drain))
        await asyncio.wait((drain, frontend.lost), return_when=asyncio.FIRST_COMPLETED)
        drain.cancel()
    if frontend.lost.done():
        return 1, frontend.lost.result()
    if frontend.leaving.done():
        return 1, frontend.leaving.result()
    return 0, "drained"


def _server(frontend: Frontend) -> Server:
    access = Access(frontend.config.tls, frontend.secret)
    server = Server([SERVICE_NAME, *frontend.role.service_names], [access])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(frontend), server.grpc)
    frontend.role.register(server.grpc, frontend.links)
    frontend.state_changed = lambda state: server.set_serving(state is State.READY)
    return server


def _probes(frontend: Frontend) -> Starlette:
    """Plain HTTP for Prometheus and probes: /metrics, /health (the process lives) and /ready (the worker is READY)."""

    async def metrics(request: Request) -> Response:
        frontend.gc.report()
        frontend.board.report(frontend.metrics)
        latest = prometheus_client.generate_latest(frontend.registry)
        return Response(latest, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def health(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(request: Request) -> Response:
        state = frontend.lifecycle.state
        return PlainTextResponse(f"{state}\n", 200 if state is State.READY else 503)

    return Starlette(routes=[Route("/metrics", metrics), Route("/health", health), Route("/ready", ready)])


def _signals() -> asyncio.Event:
    stop = asyncio.Event()

    def on_signal(name: str) -> None:
        if stop.is_set():
            log.warning("%s again: exiting at once", name)
            os._exit(130)
        log.info("%s: draining", name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number.name)
    return stop


def _log_plan(config: WorkerConfig) -> None:
    """What `millrace plan` prints, but for memory, which a rank tells when it has measured it."""
    if (setup := config.setup(gpu_here(), memory_limit())) is not None:
        lines = f"{report.settings(config, decide(setup))}\n{report.steps(setup, config)}"
        log.info("plan for %s x %s:", config.num_ranks, setup.gpu or "an unknown GPU", extra={"lines": lines})


def main(make_role: MakeRole, roles: Sequence[Role], environ: MutableMapping[str, str]) -> int:
    """A whole process from its command line to its exit code. Where it serves one role, `role` need not be configured.

    `environ`: the process's own, which its ranks inherit.
    """
    name = next((role for role in roles if f"role={role}" in sys.argv), roles[0])  # as the user calls it
    parser = argparse.ArgumentParser(prog=f"millrace {name}", description=f"Run a worker: {' or '.join(roles)}.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key; repeatable")
    parser.add_argument("--announce", type=Path, metavar="FILE", help="write the bound ports there as JSON")
    arguments = parser.parse_args()
    try:
        sets = [f"role={roles[0]}", *arguments.set] if len(roles) == 1 else arguments.set
        config = load(WorkerConfig, arguments.config, sets)
    except ConfigError as error:
        parser.error(str(error))
    if config.role not in roles:
        parser.error(f"role: this entry point serves {' and '.join(roles)}, not {config.role}")
    environ.update(caches.variables(config.cache_dir))
    logs.setup(str(config.role), config.log_level)
    _log_plan(config)
    try:
        return run(serve(config, make_role, arguments.announce))
    except OSError as error:  # a port that is taken
        log.error("%s", error)
        return 1
