"""A local cluster within this process: its routers and frontends run on the test's event loop, each rank in a thread.

It is ready in a tenth of the time that processes take, so it is for tests that send no signal and read no log.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from millrace_cli.cluster import ClusterSpec, LocalCluster
from millrace_common import gc_hooks
from millrace_common.config import load
from millrace_router.config import RouterConfig
from millrace_router.main import Router

from millrace_testing import HANG_S
from millrace_testing.hasty import hasty_servers
from millrace_testing.inside import Inside

# All of it shares the time of one thread, so a busy machine delays each answer. No test of it is about these limits.
ANSWERS = ("cli.probe.TIMEOUT_S", "router.fleet.warmups.WARMUP_S", "router.fleet.worker.CONNECT_S")
ROUTER_LIMITS = ("no_workers", "queue", "prefill", "handover", "stall", "silence")
WORKER_LIMITS = ("warmup", "stall", "lease")


class InsideCluster(LocalCluster):
    def __init__(self, spec: ClusterSpec) -> None:
        super().__init__(spec)
        self._stops: dict[str, Callable[[], Awaitable[None]]] = {}
        self._patch = pytest.MonkeyPatch()

    async def start(self) -> None:
        self._patch.setattr(gc_hooks, "freeze", lambda: 2000)  # this process would keep the garbage of all tests
        hasty_servers(self._patch)
        for limit in (*ANSWERS, "serve.handover.peers.UNARY_TIMEOUT_S"):
            self._patch.setattr(f"millrace_{limit}", HANG_S)
        deadline = time.monotonic() + HANG_S
        await asyncio.gather(*map(self.restart, self.spec.workers()))
        await asyncio.gather(*map(self.restart, self.routers))
        await self._until(self._ready, (), deadline)

    async def restart(self, name: str) -> None:
        """On the ports that it had, if any."""
        role = self.roles[name]
        limits = ROUTER_LIMITS if role == "router" else WORKER_LIMITS
        items = [*(f"timeouts.{limit}={HANG_S}" for limit in limits), *self._arguments(name)[1::2]]
        if role == "router":
            router = Router(load(RouterConfig, None, items))
            await router.start()
            self._ports[name], self._stops[name] = router.ports, router.stop
        else:
            worker = Inside(role, items)
            await worker.start()
            self._ports[name], self._stops[name] = worker.process.ports, worker.close

    async def end(self, *names: str) -> None:
        await asyncio.gather(*(self._stops.pop(name)() for name in names))

    async def stop(self) -> None:
        try:
            for names in (self.routers, self.spec.workers()):
                await self.end(*(name for name in names if name in self._stops))
        finally:
            self._patch.undo()
