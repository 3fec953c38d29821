"""A local cluster whose processes a test kills, stops and starts.

async with ControlledCluster(ClusterSpec(engine="sim")) as cluster:
    await cluster.kill("decode-0")
    await cluster.restart("decode-0")       # on its old port
    await cluster.wait_routable("decode-0")
"""

import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from millrace_cli.cluster import ClusterSpec, LocalCluster, server_command

SMALL = ("limits.num_pages=300", "limits.max_prefill_tokens=256")  # seconds less of each start of a model on a CPU


@dataclass(frozen=True, slots=True)
class MixedSpec(ClusterSpec):
    """Workers that differ."""

    own: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # further `--set` items of a worker, by its name

    def settings(self, name: str) -> tuple[str, ...]:
        return (*ClusterSpec.settings(self, name), *self.own.get(name, ()))


def with_workers(module: str) -> Callable[[str], list[str]]:
    """The commands of a cluster whose workers are those of a module of millrace_testing."""
    worker = [sys.executable, "-m", f"millrace_testing.{module}"]
    return lambda role: server_command(role) if role == "router" else [*worker, role]


class ControlledCluster(LocalCluster):
    def pid(self, name: str) -> int:
        return self.processes[name].pid

    async def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal that ends the process, and wait for the end. Even with `spec.restart` it stays away until
        `restart`.
        """
        self._watchers[name].cancel()
        self.processes[name].send(number)
        await self.processes[name].wait()

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal and do not wait: SIGSTOP and SIGCONT make a stall."""
        self.processes[name].send(number)

    async def restart(self, name: str) -> None:
        """Stop the process if it runs, and start it on the ports it had. Returns when it has bound them."""
        self._watchers[name].cancel()
        await self.processes[name].stop(self.spec.stop_grace_s)
        await self._spawn(name)
        await self._until(lambda: self._announced((name,)), (name,), time.monotonic() + self.spec.patience_s)

    async def wait_routable(self, *names: str) -> None:
        """Until the router sends requests to all of these workers (default: all workers)."""
        names = names or tuple(self.spec.workers())
        must_run = () if self.spec.restart else names
        await self._until(lambda: self._routable(names), must_run, time.monotonic() + self.spec.patience_s)
