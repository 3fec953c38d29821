"""A router and its workers as processes of this machine, for `millrace serve-local`, the e2e tests and the benches.

    async with LocalCluster(ClusterSpec(engine="sim")) as cluster:
        ...  cluster.grpc_address ("127.0.0.1:41123"), cluster.http_url ("http://127.0.0.1:39801")

A start is over when the router is serving and every worker is routable. A child that exits before fails the start with
the tail of its log; later an exit is logged, and with `spec.restart` the child comes back on its old ports after a
back-off. Nothing survives this process, however it ends (see exec_guard).
"""

import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from millrace.v1 import worker_pb2
from millrace_common.deployment_secret import read
from millrace_common.tls_config import Tls
from millrace_rpc.access import token
from millrace_rpc.enums import name_of
from millrace_rpc.tls import Identity

from millrace_cli import probe
from millrace_cli.process import Process

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
POLL_S = 0.1
START_S, GPU_START_S = 120.0, 600.0  # a worker on a GPU compiles kernels for minutes when its caches are empty
GPU_MEMORY = 0.9  # of a GPU, for all workers together
LOG_DIR = "MILLRACE_LOG_DIR"  # variable of the environment: where the log folders of clusters are made
_SOURCE_TREE, _WHEEL = Path(__file__).parents[2] / "models" / "tiny", Path(__file__).with_name("tiny")  # see setup.py
TINY = _SOURCE_TREE if _SOURCE_TREE.exists() else _WHEEL  # the trained checkpoint
BACKOFF_S = (0.5, 30.0)  # first and longest pause before a child comes back; it doubles with every exit within 30 s
ROUTER_PORTS = ("grpc", "http", "admin", "admin_http")
SERVERS = {  # role to module and first arguments
    "router": ("millrace_router",),
    "prefill": ("millrace_serve.prefill",),
    "decode": ("millrace_serve.decode",),
    "unified": ("millrace_serve.decode", "--set", "role=unified"),
    "flexible": ("millrace_serve.decode", "--set", "role=flexible"),
}


def server_command(role: str) -> list[str]:
    return [sys.executable, "-m", *SERVERS[role]]


def count_gpus() -> int:
    """GPUs that this process may use; 1 on a host that lists none."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(shown.split(",")) if shown else max(len(list(Path("/dev").glob("nvidia[0-9]*"))), 1)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What to start. A port that is 0 or not given: any free one."""

    prefill: int = 1
    decode: int = 1
    unified: int = 0  # instead of prefill and decode, which are 0 then
    flexible: int = 0  # likewise
    engine: Literal["model", "sim"] = "model"
    model: Path = TINY  # checkpoint folder; with the sim engine only its tokenizer is used
    ports: Mapping[str, int] = field(default_factory=dict)  # of the router, by the names in ROUTER_PORTS
    worker_set: tuple[str, ...] = ()  # further `--set` items of every worker
    role_set: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # before them, of the workers of a role
    router_set: tuple[str, ...] = ()
    routers: int = 1
    gpus: int = field(default_factory=count_gpus)  # for workers with device=cuda
    tls: Tls | None = None  # of everything, and of our own questions
    secret: Path | None = None  # likewise
    log_dir: Path | None = None  # default: a new folder in $MILLRACE_LOG_DIR or /tmp, which stays
    restart: bool = False  # bring back children that exit by themselves
    start_timeout_s: float | None = None  # default: START_S, on a GPU GPU_START_S
    stop_grace_s: float = 15.0  # for the router, then again for all workers together
    command: Callable[[str], list[str]] = server_command  # role to command line

    def workers(self) -> dict[str, str]:
        """Name to role."""
        roles = [role for role in SERVERS if role != "router"]
        return {f"{role}-{i}": role for role in roles for i in range(getattr(self, role))}

    @property
    def patience_s(self) -> float:
        if self.start_timeout_s is not None:
            return self.start_timeout_s
        return GPU_START_S if any(_on_gpu(self._items(role)) for role in self.workers().values()) else START_S

    def settings(self, name: str) -> tuple[str, ...]:
        """`--set` items of a worker. On GPUs each has the next ones; those that share one get equal parts of it."""
        workers = {worker: self._items(role) for worker, role in self.workers().items()}
        items = workers[name]
        if not _on_gpu(items):
            return items
        ranks = {worker: _last(own, "tp") * _last(own, "dp") for worker, own in workers.items() if _on_gpu(own)}
        first = sum(ranks[worker] for worker in list(ranks)[: list(ranks).index(name)])
        own: tuple[str, ...] = (f"first_gpu={first}",)
        sharing = -(-sum(ranks.values()) // self.gpus)
        if sharing > 1 and not any("memory_fraction=" in item for item in items):
            own += (f"memory_fraction={GPU_MEMORY / sharing:.3f}",)
        return (*own, *items)

    def worker_items(self, name: str) -> tuple[str, ...]:
        """All of its `--set` items but the port."""
        return (f"engine={self.engine}", f"model={self.model}", *self.settings(name))

    def _items(self, role: str) -> tuple[str, ...]:
        return (*self.role_set.get(role, ()), *self.worker_set)


def _on_gpu(items: Sequence[str]) -> bool:
    devices = [item.partition("=")[2].strip('"') for item in items if item.startswith("device=")]
    return devices[-1:] == ["cuda"]


def _last(items: Sequence[str], key: str) -> int:
    """The last value of `key` among a worker's settings; 1 when it is absent or no number."""
    values = [item.partition("=")[2].strip() for item in items if item.startswith(f"{key}=")]
    return int(values[-1]) if values and values[-1].isdecimal() else 1


def new_log_dir() -> Path:
    parent = os.environ.get(LOG_DIR)
    if parent:
        Path(parent).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="millrace-", dir=parent or None))


class StartError(Exception):
    """The cluster did not become ready; the message has the end of the log with the reason."""


class LocalCluster:
    """Names of processes: "router", "router-1", "prefill-0", "decode-0", …; an unknown one is a KeyError."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.log_dir = spec.log_dir or new_log_dir()
        self.routers = ("router", *(f"router-{i}" for i in range(1, spec.routers)))
        self.roles = {**dict.fromkeys(self.routers, "router"), **spec.workers()}
        threads = max(1, (os.cpu_count() or 1) // len(self.roles))
        env = {"OMP_NUM_THREADS": str(threads), **os.environ}
        self.processes = {name: Process(name, self.log_dir, env) for name in self.roles}
        self._identity = None if spec.tls is None else Identity(spec.tls)
        self._token = token(read(spec.secret))
        self._ports: dict[str, dict[str, int]] = {}
        self._started = False
        self._watchers: dict[str, asyncio.Task[None]] = {}  # of processes that run

    def address(self, name: str, service: str = "grpc") -> str:
        """`host:port` of a process. Services: "grpc"; the router also has "http", "admin" and "admin_http"."""
        return f"{HOST}:{self._ports[name][service]}"

    @property
    def grpc_address(self) -> str:
        return self.address("router")

    @property
    def admin_address(self) -> str:
        return self.address("router", "admin")

    @property
    def http_url(self) -> str:
        return self._url("http")

    @property
    def admin_http_url(self) -> str:
        return self._url("admin_http")

    def _url(self, service: str) -> str:
        return f"{'https' if self._identity else 'http'}://{self.address('router', service)}"

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything; return when the router is ready. StartError when a child exits or time runs out."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        workers = tuple(self.spec.workers())
        deadline = time.monotonic() + self.spec.patience_s
        for name in workers:
            await self._spawn(name)
        await self._until(lambda: self._announced(workers), workers, deadline)
        for name in self.routers:
            await self._spawn(name)
        await self._until(lambda: self._announced(self.routers), tuple(self.roles), deadline)
        await self._until(self._ready, tuple(self.roles), deadline)
        self._check_running(tuple(self.roles))  # one may have ended after it gave its answer: nobody watches it yet
        self._started = True

    async def stop(self) -> None:
        """Stop the router, then the workers, each within the grace. Cancelled, it kills instead of waiting."""
        routers, workers = ([self.processes[name] for name in names] for names in (self.routers, self.spec.workers()))
        for watcher in self._watchers.values():
            watcher.cancel()
        try:
            await asyncio.gather(*self._watchers.values(), return_exceptions=True)
            for together in (routers, workers):
                await asyncio.gather(*(process.stop(self.spec.stop_grace_s) for process in together))
        finally:
            self.kill_all()

    def kill_all(self) -> None:
        """SIGKILL to everything at once; `stop` afterwards returns quickly."""
        for process in self.processes.values():
            process.kill_group()

    async def _spawn(self, name: str, pause_s: float = BACKOFF_S[0]) -> None:
        """Start a process and watch it. `pause_s`: how long to wait before bringing it back after its next exit."""
        await self.processes[name].start([*self.spec.command(self.roles[name]), *self._arguments(name)])
        self._watchers[name] = asyncio.create_task(self._watch(name, pause_s))

    def _arguments(self, name: str) -> list[str]:
        """Options of a process: its ports (those it had before, if any), then the spec's own settings."""
        role, ports = self.roles[name], self._ports.get(name, {})
        if role == "router":
            fixed = self.spec.ports if name == "router" else {}
            items = [
                *(f"{port}={HOST}:{ports.get(port, fixed.get(port, 0))}" for port in ROUTER_PORTS),
                f"workers={json.dumps([self.address(worker) for worker in self.spec.workers()])}",
                f"model={self.spec.model}",
                *self.spec.router_set,
            ]
        else:
            items = [f"grpc_port={ports.get('grpc', 0)}", *self.spec.worker_items(name)]
        if self.spec.secret is not None:
            items.append(f"secret={self.spec.secret}")
        if self.spec.tls is not None:
            items += [f"tls.{key}={value}" for key, value in self.spec.tls.model_dump(exclude_defaults=True).items()]
        return [argument for item in items for argument in ("--set", item)]

    async def _watch(self, name: str, pause_s: float) -> None:
        """Wait until a process ends by itself, log the end, and bring the process back if `spec.restart` is set."""
        process = self.processes[name]
        code = await process.wait()
        if not self._started:
            return  # `start` raises StartError
        log.error("%s ended with code %d. %s", name, code, process.end_of_log(10))
        if process.seconds > BACKOFF_S[1]:
            pause_s = BACKOFF_S[0]
        while self.spec.restart:
            log.warning("%s starts again in %.1f s", name, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, BACKOFF_S[1])
            try:
                await self._spawn(name, pause_s)
                return
            except OSError as error:  # no process or file is to be had now
                log.error("%s cannot be started: %s", name, error)

    async def _until(
        self, condition: Callable[[], Awaitable[bool]], must_run: tuple[str, ...], deadline: float
    ) -> None:
        while not await condition():
            self._check_running(must_run)
            if time.monotonic() > deadline:
                seen = self.processes.values()
                states = ", ".join(f"{one.name} {one.state} {one.detail}".rstrip() for one in seen)
                late = "\n".join(one.end_of_log(15) for one in seen if one.state != "ready")
                raise StartError(f"not ready after {self.spec.patience_s:.0f} s: {states}.\n{late}")
            await asyncio.sleep(POLL_S)

    def _check_running(self, names: tuple[str, ...]) -> None:
        for name in names:
            process = self.processes[name]
            if process.starts and not process.running:
                raise StartError(f"{name} ended with code {process.returncode}. {process.end_of_log(30)}")

    async def _announced(self, names: tuple[str, ...]) -> bool:
        found = {name: ports for name in names if (ports := self.processes[name].announced())}
        self._ports.update(found)
        return len(found) == len(names)

    async def _ready(self) -> bool:
        workers = tuple(self.spec.workers())
        infos = await asyncio.gather(
            *(probe.worker_info(self.address(name), self._identity, self._token) for name in workers)
        )
        for name, info in zip(workers, infos, strict=True):
            if info is not None:
                self.processes[name].note(name_of(worker_pb2.WorkerState, info.state), info.state_message)
        ready = True
        for name in self.routers:
            serving = await probe.is_serving(self.address(name), self._identity)
            self.processes[name].note("ready" if serving else "pairing")
            ready = ready and serving and await self._routable(workers, name)
        return ready

    async def _routable(self, names: tuple[str, ...], router: str = "router") -> bool:
        seen = await probe.workers(self.address(router, "admin"), self._identity)
        routable = {worker.address for worker in seen or () if worker.routable}
        return all(self.address(name) in routable for name in names)
