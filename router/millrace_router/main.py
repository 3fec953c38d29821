"""A router process from start to exit.

1. Load the tokenizer, bind the ports (gRPC and HTTP, public and admin), freeze the garbage collector, announce the
   ports. Not serving yet: /ready is 503, gRPC health NOT_SERVING.
2. Discover the workers and connect to them; their pairs are warmed; with the first routable pair the collector is
   frozen again and the router is serving, and without any it is not: never latched.
3. SIGTERM or SIGINT: refuse new requests (DRAINING) and send clients away: clients that watch the health leave by
   themselves, after a moment the others get GOAWAY, HTTP answers carry `connection: close`. Running streams finish, up
   to the grace; the rest ends with DRAINING; exit 0. Without streams the process ends at once.
"""

import argparse
import asyncio
import logging
import secrets
import signal
import time
from pathlib import Path

from millrace.v1 import admin_pb2_grpc
from millrace_common import deployment_secret, loop_lag, tracing
from millrace_common import log as logs
from millrace_common.config import ConfigError, load
from millrace_common.gc_hooks import ProcessGc
from millrace_common.reasons import Reason
from millrace_common.tls_config import exposed
from millrace_rpc.access import Access
from millrace_rpc.errors import MillraceError
from millrace_rpc.http_connection import ConnectionLimits
from millrace_rpc.http_server import HttpServer
from millrace_rpc.server import Server, announce, run
from millrace_rpc.tls import identity_of

from millrace_router.admin import http as admin_http
from millrace_router.admin import service as admin
from millrace_router.admin.page import PublicHttp
from millrace_router.admin.traffic import Recent
from millrace_router.apis import public_http
from millrace_router.apis.grpc import service as grpc_service
from millrace_router.config import RouterConfig
from millrace_router.duties.demand import RecentDemand
from millrace_router.duties.lead import Lead
from millrace_router.fleet.registry import Registry
from millrace_router.flow.generation import Backend
from millrace_router.flow.inference import Inference
from millrace_router.flow.metrics import build, forget_tenants, forget_workers
from millrace_router.http import probes
from millrace_router.http.answers import new_app
from millrace_router.http.api_keys import Keys
from millrace_router.http.guard import GrpcGuard, HttpGuard, with_cors
from millrace_router.queue.admission import Admission
from millrace_router.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

STOP_GRACE_S = 1.0  # for connections, once every stream has ended
PUMP_PAUSE = 4.0  # times as long as the look at the queue before took
PARTING_S = 1.0  # until GOAWAY, which cancels a call that crosses it: clients that watch the health leave before


class Router:
    """`start`, then `ports` has the bound addresses; `stop` drains."""

    def __init__(self, config: RouterConfig) -> None:
        self.metrics = metrics = build()
        self.config = config
        self.tracer = tracing.make(config.tracing, "millrace-router", secrets.token_hex(8))
        self._inside = identity_of(config.tls, metrics)  # towards workers and operators
        self._public_identity = identity_of(config.public_tls, metrics, "public_tls") or self._inside
        self._keys: Keys | None = None
        if config.api_keys is not None:
            self._keys = Keys(config.api_keys, time.monotonic, self._keys_reloaded, keep=config.api_keys_keep)
        self.registry = Registry(config, metrics, self._changed, identity=self._inside)
        self.admission = Admission(config.queue_size, config.timeouts.queue, self.registry, metrics.queued.set)
        self._gc = ProcessGc("router", metrics)
        demand = RecentDemand()
        backend = Backend(config, self.registry, self.admission, metrics, self.tracer, demand)
        fleet, queued = self.registry.serving, lambda: (len(self.admission), self.admission.tokens)
        self._lead = Lead(self.registry.router_id, config.routing, demand, fleet, queued, metrics)
        tokenizer = Tokenizer.load(config.model, config.chat_template, config.special_tokens_in)
        self.inference = Inference(backend, tokenizer)
        self.ports: dict[str, int] = {}
        self._public = Server([grpc_service.SERVICE], [GrpcGuard(self._keys)], config.connections.grpc_options)
        secret = deployment_secret.read(config.secret)
        grpc_access, http_access = (
            Access(config.tls, secret if exposed(address.rpartition(":")[0], config.tls) else b"")
            for address in (config.admin, config.admin_http)
        )
        self._admin = Server([admin.SERVICE], [grpc_access])
        self._recent = Recent(self.inference)
        self._public_http = PublicHttp(tls=self._public_identity is not None)
        operations = admin.Admin(self.registry, self._gc, self._recent, self._public_http)
        admin_pb2_grpc.add_AdminServicer_to_server(operations, self._admin.grpc)
        limits = config.connections
        inside = ConnectionLimits(limits.idle)
        pages = admin_http.build(operations, self._public_http, [config.admin_http.rpartition(":")[0].lower()])
        self._admin_http = HttpServer(admin_http.AdminGuard(pages, http_access), inside)
        # Metrics tell of all tenants.
        beside = self._before_scrape if config.metrics is None and config.api_keys is None else None
        self._parting = asyncio.Event()
        public = HttpGuard(public_http.build(self.inference, beside), self._keys)
        outside = ConnectionLimits(limits.idle, limits.most, limits.per_address, limits.max_age, config.timeouts.client)
        self._http = HttpServer(with_cors(public, limits.cors), outside, self._parting)
        self._probes = HttpServer(new_app(probes.routes(backend, self._before_scrape)), inside)
        self._serving = False
        self._pump: asyncio.TimerHandle | None = None
        self._pump_at = 0.0  # by time.perf_counter
        self._measuring: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._public.grpc.add_generic_rpc_handlers((grpc_service.InferenceService(self.inference).handlers(),))
        config, public, inside = self.config, self._public_identity, self._inside
        self.ports["http"] = self._public_http.port = self._http.start(config.http, public)
        self.ports["admin_http"] = self._admin_http.start(config.admin_http, inside)
        if config.metrics is not None:  # gRPC comes last: it writes tracebacks if a later port cannot be bound
            self.ports["metrics"] = self._probes.start(config.metrics)
        if config.health is not None:
            self.ports["health"] = await self._public.start_health(config.health)
        self.ports["grpc"] = await self._public.start(config.grpc, public)
        self.ports["admin"] = await self._admin.start(config.admin, inside)
        self._admin.set_serving(True)
        self.inference.tokenizer.decode(await self.inference.tokenizer.encode("warm-up", add_bos=True))
        self._gc.freeze()
        measuring = (loop_lag.measure("router", self.metrics), self._recent.keep(), self._lead.run())
        self._measuring = [asyncio.create_task(one) for one in measuring]
        self.registry.start()

    async def stop(self) -> None:
        self.admission.closed = True
        self._follow_readiness()
        self._parting.set()
        parting = asyncio.create_task(self._part())
        error = MillraceError(Reason.DRAINING, "the router is shutting down")
        await self.inference.drain(self.config.timeouts.drain, error)
        parting.cancel()
        servers = (server.stop(STOP_GRACE_S) for server in (self._public, self._admin))
        await asyncio.gather(*servers, self._http.stop(), self._admin_http.stop(), self._probes.stop())
        for task in self._measuring:
            task.cancel()
        await self.registry.stop()
        await asyncio.to_thread(self.tracer.close)
        self._gc.close()

    async def _part(self) -> None:
        """A long drain must not keep clients on connections whose every new call it refuses: through a Service they
        come to another router. Their running streams stay.
        """
        await asyncio.sleep(PARTING_S)
        log.info("closing client connections: %d requests are running", len(self.inference.active))
        await self._public.grpc.stop(self.config.timeouts.drain + STOP_GRACE_S)

    def _before_scrape(self) -> None:
        self._gc.report()
        self.registry.health.report()
        if self._keys is not None:
            forget_tenants(self.metrics, self._keys.names)
        forget_workers(self.metrics, self.registry.workers.keys())
        self.metrics.queued_tokens.set(self.admission.tokens)
        self.metrics.queue_wait.set(self.admission.drained_in() or 0 if self.admission.tokens else 0)

    def _keys_reloaded(self, outcome: str) -> None:
        self.metrics.reloads.labels(what="api_keys", outcome=outcome).inc()

    def _changed(self) -> None:
        self._follow_readiness()
        if self._pump is None and len(self.admission):
            self.admission.due = True
            self._pump = asyncio.get_running_loop().call_later(
                max(self._pump_at - time.perf_counter(), 0.0), self._pump_queue
            )

    def _pump_queue(self) -> None:
        """While all workers are full, each of them reports its load all the time, and each look at the queue takes as
        long as there are workers: looks take a fifth of the time at most.
        """
        self._pump, began = None, time.perf_counter()
        self.admission.pump()
        now = time.perf_counter()
        self._pump_at = now + PUMP_PAUSE * (now - began)

    def _follow_readiness(self) -> None:
        """The health service follows the registry."""
        ready = self.registry.ready and not self.admission.closed
        if ready is not self._serving:
            self._serving = ready
            log.info("serving" if ready else "not serving")
            if ready:
                self.admission.resume()
                self._gc.freeze()  # objects of the pairs' warm-up
            self._public.set_serving(ready)


async def serve(config: RouterConfig, announced: Path | None = None) -> int:
    """Run until SIGTERM or SIGINT. The ports are written to `announced` as JSON once they are bound."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    router = Router(config)
    await router.start()
    log.info("listening: %s; workers by %s", router.ports, config.discovery.kind)
    if announced is not None:
        announce(announced, router.ports)
    await stopping.wait()
    log.info("stopping: %d requests are running", len(router.inference.active))
    await router.stop()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="millrace router", description="Run a router, which needs no GPU.")
    parser.add_argument("--config", type=Path, help="YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key; repeatable")
    parser.add_argument("--announce", type=Path, help="write the bound ports there as JSON")
    arguments = parser.parse_args()
    try:
        config = load(RouterConfig, arguments.config, arguments.set)
        logs.setup("router", config.log_level)
        return run(serve(config, arguments.announce))
    except (ConfigError, OSError) as error:
        parser.exit(2, f"millrace router: {error}\n")
