"""Routers and workers as single processes that a test can break and bring back on their ports, with proxies between.

async with System(folder, prefill=2, decode=2, routers=2) as system:
    await system.node("decode-0").kill(); await system.node("decode-0").start(); await system.whole()
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from millrace.v1 import admin_pb2, admin_pb2_grpc
from millrace_cli.cluster import TINY, server_command
from millrace_cli.process import Process
from millrace_rpc.client import channel

from millrace_testing.proxy import Proxy

HOST = "127.0.0.1"
START_S = 90.0
GRACE_S = 20.0


class Node:
    """One process. `start` again after its end: it comes back on the ports that it had."""

    def __init__(self, name: str, folder: Path, sets: Sequence[str]) -> None:
        self.name = name
        self.role = name.partition("-")[0]
        self._sets = list(sets)
        self._process = Process(name, folder, {**os.environ, "OMP_NUM_THREADS": "1"})
        self._ports: dict[str, int] = {}

    def address(self, service: str = "grpc") -> str:
        return f"{HOST}:{self._ports[service]}"

    async def start(self) -> None:
        """Until its ports are bound."""
        if self.role == "router":
            bound = [f"{name}={HOST}:{port}" for name, port in self._ports.items() if name in ("grpc", "http", "admin")]
        else:
            bound = [f"grpc_port={self._ports['grpc']}"] if self._ports else []
        items = [word for item in (*self._sets, *bound) for word in ("--set", item)]
        await self._process.start([*server_command(self.role), *items])
        deadline = time.monotonic() + START_S
        while (ports := self._process.announced()) is None:
            alive = self._process.running and time.monotonic() < deadline
            assert alive, f"{self.name} did not start:\n{self._process.log_tail()}"
            await asyncio.sleep(0.05)
        self._ports = {name: port for name, port in ports.items() if name != "pid"}

    async def kill(self) -> None:
        self._process.kill_group()
        await self._process.wait()

    async def terminate(self) -> int:
        """SIGTERM, and its exit code: it drains first."""
        self._process.send(signal.SIGTERM)
        return await asyncio.wait_for(self._process.wait(), START_S)

    def send(self, number: signal.Signals) -> None:
        """To the process and its ranks."""
        os.killpg(self._process.pid, number)

    async def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGCONT)
        await self._process.stop(GRACE_S)


class System:
    """Workers with the simulated engine, a proxy in front of each, and routers that reach them through these."""

    def __init__(
        self,
        folder: Path,
        *,
        prefill: int,
        decode: int,
        routers: int,
        worker_set: Sequence[str] = (),
        router_set: Sequence[str] = (),
    ) -> None:
        self.proxies: dict[str, Proxy] = {}
        self._router_set = router_set
        names = [*(f"prefill-{i}" for i in range(prefill)), *(f"decode-{i}" for i in range(decode))]
        common = [f"model={TINY}", "log_level=INFO"]
        self.workers = [Node(name, folder, [*common, "engine=sim", *worker_set]) for name in names]
        self._folder, self._common, self._count = folder, common, routers
        self.routers: list[Node] = []
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> System:
        try:
            for worker in self.workers:
                self._stack.push_async_callback(worker.stop)
            await asyncio.gather(*(worker.start() for worker in self.workers))
            for worker in self.workers:
                self.proxies[worker.name] = await self._stack.enter_async_context(Proxy(worker.address()))
            known = f"workers={json.dumps([proxy.address for proxy in self.proxies.values()])}"
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

    def node(self, name: str) -> Node:
        return next(node for node in (*self.workers, *self.routers) if node.name == name)

    async def whole(self) -> None:
        """Until every router sends requests to every worker."""
        deadline = time.monotonic() + START_S
        while not all([await self._sees_all(router) for router in self.routers]):
            assert time.monotonic() < deadline, f"workers are not routable again; logs in {self._folder}"
            await asyncio.sleep(0.05)

    async def _sees_all(self, router: Node) -> bool:
        async with channel(router.address("admin")) as ch:
            try:
                listed = await admin_pb2_grpc.AdminStub(ch).ListWorkers(admin_pb2.ListWorkersRequest(), timeout=5)
            except grpc.aio.AioRpcError:
                return False
        return sum(worker.routable for worker in listed.workers) == len(self.workers)
