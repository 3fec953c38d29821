"""Routers and workers as single processes that a test can break and bring back on their ports. Workers can be cut off:
there is a proxy in front of each, or each lives in a network namespace of its own.

async with System(folder, prefill=2, decode=2, routers=2) as system:
    await system.workers[0].kill(); await system.workers[0].start(); await system.whole()
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import grpc
import psutil
from millrace.v1 import admin_pb2, admin_pb2_grpc
from millrace_cli.cluster import TINY, server_command
from millrace_cli.process import Process
from millrace_rpc.access import token
from millrace_rpc.client import channel

from millrace_testing import HANG_S
from millrace_testing.faulty_worker import HANG
from millrace_testing.namespaces import Namespaces
from millrace_testing.procs import PYTHONPATH, ranks_of
from millrace_testing.proxy import Proxy
from millrace_testing.shared_disk import SharedDisk

HOST = "127.0.0.1"
FAULTY = (sys.executable, "-m", "millrace_testing.faulty_worker")
GRACE_S = 20.0
SECRET = "of a system that tests break"
TOKEN = token(SECRET.encode())  # for calls of workers and of routers' admin ports


class Node:
    """One process. `start` again after its end: it comes back on the ports that it had."""

    def __init__(
        self, name: str, folder: Path, sets: Sequence[str], host: str = HOST, enter: Sequence[str] = ()
    ) -> None:
        """`enter`: what stands before its command line. A worker is one of faulty_worker.py, whose step `hangs`."""
        self.name = name
        self.role = name.partition("-")[0]
        self._host, self._enter = host, enter
        self._sets = list(sets)
        self.hanging = folder / f"{name}-hangs"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, HANG: str(self.hanging)}
        self._process = Process(name, folder, env)
        self._ports: dict[str, int] = {}

    def address(self, service: str = "grpc") -> str:
        return f"{self._host}:{self._ports[service]}"

    async def start(self) -> None:
        """Until its ports are bound."""
        if self.role == "router":
            bound = [f"{name}={HOST}:{port}" for name, port in self._ports.items() if name in ("grpc", "http", "admin")]
        else:
            bound = [f"host={self._host}", *([f"grpc_port={self._ports['grpc']}"] if self._ports else [])]
        items = [word for item in (*self._sets, *bound) for word in ("--set", item)]
        command = server_command("router") if self.role == "router" else [*FAULTY, self.role]
        await self._process.start([*self._enter, *command, *items])
        deadline = time.monotonic() + HANG_S
        while (ports := self._process.announced()) is None:
            alive = self._process.running and time.monotonic() < deadline
            assert alive, f"{self.name} did not start ({self._process.returncode}):\n{self._process.log_tail()}"
            await asyncio.sleep(0.05)
        self._ports = {name: port for name, port in ports.items() if name != "pid"}

    async def kill(self) -> None:
        self._process.kill_group()
        await self._process.wait()

    async def terminate(self) -> int:
        """SIGTERM, and its exit code: it drains first."""
        self._process.send(signal.SIGTERM)
        return await self.ended()

    async def ended(self) -> int:
        """Wait for its end; the exit code."""
        return await asyncio.wait_for(self._process.wait(), HANG_S)

    def send(self, number: signal.Signals) -> None:
        """To the process and its ranks."""
        os.killpg(self._process.pid, number)

    @property
    def processes(self) -> list[psutil.Process]:
        """The frontend and its ranks."""
        return [psutil.Process(self._process.pid), *ranks_of(self._process.pid)]

    async def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGCONT)
        await self._process.stop(GRACE_S)


class System:
    """Workers with the simulated engine, and routers that reach them so that `cut` and `join` can come between."""

    def __init__(
        self,
        folder: Path,
        *,
        routers: int,
        prefill: int = 0,
        decode: int = 0,
        flexible: int = 0,
        worker_set: Sequence[str] = (),
        router_set: Sequence[str] = (),
        namespaces: bool = False,
        disk_mib: int = 0,
    ) -> None:
        """`namespaces`: cut off by these, in place of proxies; see `namespaces.available`. `disk_mib`: size of the disk
        tier's file system, where the worker's limits ask for that tier; 0: none.
        """
        self._proxies: dict[str, Proxy] = {}
        self._router_set = router_set
        counts = {"prefill": prefill, "decode": decode, "flexible": flexible}
        names = [f"{role}-{i}" for role, count in counts.items() for i in range(count)]
        self._spaces = Namespaces(names) if namespaces else None
        self.disk = SharedDisk(folder / "disk", disk_mib) if disk_mib else None
        secret = folder / "secret"  # without one, workers in namespaces do not start: others reach their ports
        secret.write_text(SECRET)
        common = [f"model={TINY}", "log_level=INFO", f"secret={secret}"]
        tier = [f"limits.disk_cache={self.disk.folder}"] if self.disk is not None else []
        sets = [*common, "engine=sim", *worker_set, *tier]
        places = {name: (s.host(name), s.enter(name)) if (s := self._spaces) else () for name in names}
        self.workers = [Node(name, folder, sets, *place) for name, place in places.items()]
        self._folder, self._common, self._count = folder, common, routers
        self.routers: list[Node] = []
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            if self.disk is not None:
                self._stack.callback(self.disk.close)
            if self._spaces is not None:
                self._stack.enter_context(self._spaces)
            for worker in self.workers:
                self._stack.push_async_callback(worker.stop)
            await asyncio.gather(*(worker.start() for worker in self.workers))
            known = f"workers={json.dumps([await self._way_to(worker) for worker in self.workers])}"
            self.routers = [
                Node(f"router-{i}", self._folder, [*self._common, known, *self._router_set]) for i in range(self._count)
            ]
            for router in self.routers:
                self._stack.push_async_callback(router.stop)
            await asyncio.gather(*(router.start() for router in self.routers))
            await self.whole()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def cut(self, worker: Node) -> None:
        """Nothing reaches this worker any more, and no connection is closed."""
        if self._spaces is not None:
            self._spaces.cut(worker.name)
        else:
            self._proxies[worker.name].freeze()

    def join(self, worker: Node) -> None:
        if self._spaces is not None:
            self._spaces.join(worker.name)
        else:
            self._proxies[worker.name].thaw()

    async def whole(self) -> None:
        """Until every router sends requests to every worker."""
        deadline = time.monotonic() + HANG_S
        while not all([await self._sees_all(router) for router in self.routers]):
            assert time.monotonic() < deadline, f"workers are not routable again; logs in {self._folder}"
            await asyncio.sleep(0.05)

    async def _way_to(self, worker: Node) -> str:
        """The address that routers are told."""
        if self._spaces is not None:
            return worker.address()
        proxy = self._proxies[worker.name] = await self._stack.enter_async_context(Proxy(worker.address()))
        return proxy.address

    async def _sees_all(self, router: Node) -> bool:
        async with channel(router.address("admin"), token=TOKEN) as ch:
            try:
                listed = await admin_pb2_grpc.AdminStub(ch).ListWorkers(admin_pb2.ListWorkersRequest(), timeout=5)
            except grpc.aio.AioRpcError:
                return False
        return sum(worker.routable for worker in listed.workers) == len(self.workers)
