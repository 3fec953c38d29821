"""Worker processes for tests: on free ports, with their logs in a folder of the test, and gone with it.

async with workers(tmp_path, "prefill", "decode", sets=["engine=sim"]) as (prefill, decode): ...
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import grpc
import psutil
from millrace.v1 import worker_pb2, worker_pb2_grpc
from millrace_cli.process import Process
from millrace_rpc.access import token
from millrace_rpc.client import channel

from millrace_testing import HANG_S
from millrace_testing.paths import ROOT
from millrace_testing.samples import total

PYTHONPATH = ":".join(str(ROOT / part) for part in ("proto", "kernels", "services", "router", "bench", "tests"))
SIM = ("engine=sim",)


class Worker:
    """One worker process and the client side of its WorkerService."""

    def __init__(
        self,
        role: str,
        folder: Path,
        sets: Sequence[str],
        name: str = "",
        patient: bool = False,
        versions: Mapping[str, int] | None = None,
    ) -> None:
        """`patient`: as patient_worker.py. `versions`: as versioned_worker.py."""
        paths = [PYTHONPATH, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(paths)}
        self.process = Process(name or f"{role}-{id(self):x}", folder, env)
        self.role = role
        self._sets = sets
        self._module = "patient_worker" if patient else ""
        if versions is not None:
            self._module, env["MILLRACE_VERSIONS"] = "versioned_worker", json.dumps(dict(versions))
        self._channel: grpc.aio.Channel | None = None

    async def start(self) -> None:
        """Until the ports are bound."""
        package = "prefill" if self.role == "prefill" else "decode"
        ours = [f"millrace_testing.{self._module}", package]
        module = ours if self._module else [f"millrace_serve.{package}"]
        items = [f"role={self.role}", *self._sets]
        sets = [argument for item in items for argument in ("--set", item)]
        await self.process.start([sys.executable, "-m", *module, *sets])
        await self.until(lambda: self.process.announced() is not None, "its ports")
        files = [item.removeprefix("secret=") for item in self._sets if item.startswith("secret=")]
        self.connect(token(Path(files[-1]).read_bytes().strip()) if files else "")

    def connect(self, secret_token: str = "") -> None:
        self._channel = channel(self.address, token=secret_token)
        self.stub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    async def ready(self, timeout_s: float = HANG_S) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if (await self.info()).state == worker_pb2.WORKER_STATE_READY:
                    return
            assert self.process.running and time.monotonic() < deadline, f"not ready:\n{self.process.log_tail()}"
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
        await self.process.stop(10.0)

    async def until(self, condition, what: str, timeout_s: float = HANG_S) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + timeout_s
        while not condition():
            alive = self.process.running or self.process.returncode == 0
            assert alive and time.monotonic() < deadline, f"waiting for {what}:\n{self.process.log_tail()}"
            await asyncio.sleep(0.02)

    @property
    def facts(self) -> dict[str, int | str]:
        facts = self.process.announced()
        assert facts is not None
        return facts  # type: ignore[return-value]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.facts['grpc']}"

    @property
    def epoch(self) -> str:
        return str(self.facts["epoch"])

    @property
    def channel(self) -> grpc.aio.Channel:
        assert self._channel is not None
        return self._channel

    def family(self) -> list[psutil.Process]:
        """The frontend and everything below it."""
        frontend = psutil.Process(self.process.pid)
        return [frontend, *frontend.children(recursive=True)]

    def ranks(self) -> list[psutil.Process]:
        return ranks_of(self.process.pid)

    async def info(self) -> worker_pb2.WorkerInfo:
        return await self.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=HANG_S)

    async def load(self) -> worker_pb2.LoadSnapshot:
        call = self.stub.WatchLoad(worker_pb2.WatchLoadRequest())
        snapshot = await call.read()
        call.cancel()
        return snapshot

    async def source(self) -> worker_pb2.KvSourceRef:
        info = await self.info()
        return worker_pb2.KvSourceRef(address=self.address, epoch=info.epoch, fingerprint=info.layout.fingerprint)

    async def whole(self, timeout_s: float = HANG_S) -> worker_pb2.LoadSnapshot:
        """Until nothing is held: every page is free, or an idle page of the prefix cache."""
        deadline = time.monotonic() + timeout_s
        while True:
            load = await self.load()
            if all(map(_is_whole, load.replicas)):
                return load
            assert time.monotonic() < deadline, f"{self.role} is not whole: {load}\n{self.process.log_tail()}"
            await asyncio.sleep(0.02)

    async def metric(self, name: str, **labels: str) -> float:
        return await total(f"http://127.0.0.1:{self.facts['metrics']}", name, **labels)


def _is_whole(load: worker_pb2.ReplicaLoad) -> bool:
    busy = load.running or load.waiting or load.importing or load.exporting
    return not busy and load.pages_free + load.pages_cached == load.pages_total > 0


def ranks_of(pid: int) -> list[psutil.Process]:
    """Of the frontend with this pid, by rank; multiprocessing has a helper beside them."""
    children = sorted(psutil.Process(pid).children(), key=lambda child: child.pid)
    return [child for child in children if any("spawn_main" in word for word in child.cmdline())]


async def gone(processes: Sequence[psutil.Process], timeout_s: float = HANG_S) -> None:
    """Until none of them exists any more (a zombie does not count)."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout_s)
    left = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not left, f"still there: {left}"


@contextlib.asynccontextmanager
async def workers(
    folder: Path, *roles: str, sets: Sequence[str] = SIM, patient: bool = False, timeout_s: float = HANG_S
) -> AsyncIterator[list[Worker]]:
    """Ready workers of these roles, in this order."""
    started = [Worker(role, folder, sets, patient=patient) for role in roles]
    try:
        await asyncio.gather(*(worker.start() for worker in started))
        await asyncio.gather(*(worker.ready(timeout_s) for worker in started))
        yield started
    finally:
        await asyncio.gather(*(worker.close() for worker in started))
