"""A router process from start to exit.

1. Load the tokenizer, bind the three ports (gRPC, HTTP, admin), announce them. Not serving yet: /ready says 503,
   gRPC health NOT_SERVING.
2. Connect to the workers; their pairs are warmed; with the first routable pair it is serving, and without any it is
   not: never latched.
3. SIGTERM or SIGINT: refuse new requests (DRAINING), let running streams finish up to the grace, end the rest with
   DRAINING, exit 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from millrace.v1 import admin_pb2_grpc
from millrace_rpc.errors import MillraceError, Reason
from millrace_rpc.gc_hooks import ProcessGc
from millrace_rpc.server import Server

from millrace_router import admin, grpc_service, openai_http
from millrace_router.admission import Admission
from millrace_router.config import RouterConfig
from millrace_router.generation import Backend
from millrace_router.inference import Inference
from millrace_router.metrics import build
from millrace_router.registry import Registry
from millrace_router.tokenizer import Tokenizer

log = logging.getLogger(__name__)

STOP_GRACE_S = 1.0  # for connections, once every stream has ended


class Router:
    """`start`, then `ports` says where it listens; `stop` drains."""

    def __init__(self, config: RouterConfig) -> None:
        metrics = build()
        self.config = config
        self.registry = Registry(config, metrics, self._changed)
        self.admission = Admission(config.queue_size, self.registry.choose, metrics.queued.set)
        self.metrics = metrics
        self._gc = ProcessGc("router", metrics, config.gc_warn_s)
        backend = Backend(config, self.registry, self.admission, metrics)
        self.inference = Inference(backend, Tokenizer.load(config.model))
        self.ports: dict[str, int] = {}
        self._public = Server([grpc_service.SERVICE])
        self._admin = Server([admin.SERVICE])
        self._http = _Http(openai_http.build(self.inference, self._gc.report))
        self._look = asyncio.Event()
        self._readiness: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._public.grpc.add_generic_rpc_handlers((grpc_service.InferenceService(self.inference).handlers(),))
        admin_pb2_grpc.add_AdminServicer_to_server(admin.AdminService(self.registry, self._gc.freeze), self._admin.grpc)
        self.ports["grpc"] = await self._public.start(self.config.grpc)
        self.ports["admin"] = await self._admin.start(self.config.admin)
        self.ports["http"] = self._http.start(self.config.http)
        await self._admin.set_serving(True)
        self.inference.tokenizer.decode(await self.inference.tokenizer.encode("warm-up", add_bos=True))
        self._gc.freeze()
        self._readiness = asyncio.create_task(self._keep_readiness())
        self.registry.start()

    async def stop(self) -> None:
        self.admission.closed = True
        self._look.set()
        error = MillraceError(Reason.DRAINING, "the router is shutting down")
        await self.inference.drain(self.config.timeouts.drain, error)
        await asyncio.gather(self._public.stop(STOP_GRACE_S), self._admin.stop(STOP_GRACE_S), self._http.stop())
        if self._readiness is not None:
            self._readiness.cancel()
        await self.registry.stop()
        self._gc.close()

    def _changed(self) -> None:
        self.admission.pump()
        self._look.set()

    async def _keep_readiness(self) -> None:
        """The health service follows the registry."""
        serving = False
        while True:
            await self._look.wait()
            self._look.clear()
            ready = self.registry.ready and not self.admission.closed
            if ready is not serving:
                serving = ready
                log.info("serving" if ready else "not serving")
                await self._public.set_serving(ready)


class _HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals stay ours."""
        yield


class _Http:
    """uvicorn inside our event loop."""

    def __init__(self, app: FastAPI) -> None:
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=int(STOP_GRACE_S)
        )
        self._server = _HttpServer(config)
        self._task: asyncio.Task[None] | None = None

    def start(self, address: str) -> int:
        host, _, port = address.rpartition(":")
        listener = socket.create_server((host, int(port)), backlog=2048)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        return listener.getsockname()[1]

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task


async def serve(config: RouterConfig, announce: Path | None = None) -> int:
    """Run until SIGTERM or SIGINT. The ports are written to `announce` as JSON once they are bound."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    router = Router(config)
    await router.start()
    log.info("listening: %s; workers: %s", router.ports, ", ".join(config.workers) or "none")
    if announce is not None:
        partial = announce.with_name(announce.name + ".partial")
        partial.write_text(json.dumps(router.ports | {"pid": os.getpid()}))
        partial.replace(announce)
    await stopping.wait()
    log.info("stopping: %d requests are running", len(router.inference.active))
    await router.stop()
    return 0
