"""Workers of this process: the frontend runs on the test's event loop, and each rank is a thread.

They are ready in a tenth of the time that processes take, so they are for tests that kill nothing and read no log:
`async with inside("prefill", "decode") as (prefill, decode): ...`
"""

import asyncio
import contextlib
import shutil
import signal
import tempfile
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from millrace_common.config import load
from millrace_rpc.access import token
from millrace_rpc.http_connection import ConnectionLimits
from millrace_rpc.http_server import HttpServer
from millrace_serve.handover.role import HandoverRole
from millrace_serve.worker import main
from millrace_serve.worker.channels import channel_key
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.frontend.frontend import Frontend
from millrace_serve.worker.frontend.lifecycle import State
from millrace_serve.worker.launcher import Launcher, OnExit
from millrace_serve.worker.rank import process
from millrace_serve.worker.rank.parts import RankSpec

from millrace_testing.hasty import hasty_servers
from millrace_testing.procs import SIM, Worker


class Threads(Launcher):
    def __init__(self) -> None:
        self._folder = ""
        self._ends: list[asyncio.Future[None]] = []

    def bind(self) -> str:
        self._folder = tempfile.mkdtemp(prefix="millrace-")
        return f"ipc://{self._folder}/frontend"

    async def start(self, config: WorkerConfig, frontend: str, group: str, on_exit: OnExit) -> None:
        loop = asyncio.get_running_loop()
        for rank in range(config.num_ranks):
            bind, rendezvous = f"ipc://{self._folder}/rank{rank}-{{name}}", f"file://{self._folder}/rendezvous"
            spec = RankSpec(config, rank, frontend, bind, rendezvous, group)
            self._ends.append(end := loop.create_future())

            def ended(code: int, rank: int = rank, end: asyncio.Future[None] = end) -> None:
                end.set_result(None)
                on_exit(rank, f"exit code {code}")

            def run(spec: RankSpec = spec, ended: Callable[[int], None] = ended) -> None:
                code = process.live(spec, channel_key(spec.config.secret, spec.group))
                loop.call_soon_threadsafe(ended, code)

            threading.Thread(target=run, name=f"rank {rank}", daemon=True).start()

    async def stop(self, grace_s: float) -> None:
        ends, self._ends = self._ends, []
        await asyncio.gather(*ends)
        shutil.rmtree(self._folder, ignore_errors=True)


class Serving:
    """What a test asks of a worker's process."""

    def __init__(self, config: WorkerConfig) -> None:
        self.frontend = Frontend(config, uuid.uuid4().hex, Threads(), HandoverRole)
        self.ports: dict[str, int] = {}
        self._stop = asyncio.Event()
        self._life = asyncio.create_task(self._serve(config))

    async def ready(self) -> None:
        """A thread cannot be ended before it listens, so a worker that is not ready cannot stop."""
        while self.frontend.lifecycle.state is not State.READY:
            assert self.running, self._life.result()
            await asyncio.sleep(0.005)

    async def _serve(self, config: WorkerConfig) -> int:
        server = main._server(self.frontend)
        http = HttpServer(main._probes(self.frontend), ConnectionLimits(config.timeouts.idle))
        message = "could not start"
        try:
            self.ports["grpc"] = await server.start(f"{config.host}:{config.grpc_port}", self.frontend.identity)
            self.ports["metrics"] = http.start(f"{config.host}:{config.metrics_port}")
            code, message = await main._live(self.frontend, self._stop, "here")
        finally:
            await self.frontend.close(message)
            await server.stop(main.STOP_GRACE_S)
            await http.stop()
        return code

    @property
    def running(self) -> bool:
        return not self._life.done()

    @property
    def returncode(self) -> int | None:
        return self._life.result() if self._life.done() else None

    def log_tail(self, lines: int = 30) -> str:
        return "its log is the test's"

    def send(self, number: signal.Signals) -> None:
        """One that begins a drain."""
        self._stop.set()

    async def wait(self) -> int:
        return await asyncio.shield(self._life)

    async def stop(self, grace_s: float) -> None:
        self._stop.set()
        await self._life


class Inside(Worker):
    def __init__(self, role: str, sets: Sequence[str] = SIM) -> None:
        self.role, self._channel = role, None
        self._config: WorkerConfig = load(WorkerConfig, None, [*sets, f"role={role}"])

    async def start(self) -> None:
        self.process = Serving(self._config)
        await self.process.ready()
        secret = self.process.frontend.secret
        self.connect(token(secret) if secret else "")

    @property
    def address(self) -> str:
        return f"{self._config.host}:{self.process.ports['grpc']}"

    @property
    def facts(self) -> dict[str, int | str]:
        return {**self.process.ports, "epoch": self.process.frontend.epoch}


@contextlib.asynccontextmanager
async def inside(*roles: str, sets: Sequence[str] = SIM) -> AsyncIterator[list[Inside]]:
    """Ready workers of these roles, in this order."""
    started = [Inside(role, sets) for role in roles]
    with pytest.MonkeyPatch.context() as patch:
        hasty_servers(patch)
        try:
            await asyncio.gather(*(worker.start() for worker in started))
            yield started
        finally:
            await asyncio.gather(*(worker.close() for worker in started))


@contextlib.asynccontextmanager
async def one(role: str, sets: Sequence[str] = SIM) -> AsyncIterator[Inside]:
    async with inside(role, sets=sets) as [worker]:
        yield worker
