"""Ranks as Ray actors, one per bundle of a placement group, for workers that span hosts. Ray is imported here only.

The actors belong to the frontend's Ray job: Ray ends them with it, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from millrace_serve.worker import caches
from millrace_serve.worker import rank as rank_process
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.launch import Launcher, OnExit
from millrace_serve.worker.rank import RankSpec


class RankActor:
    """Runs in its own process, on the host that Ray chose."""

    def address(self) -> str:
        return str(ray.util.get_node_ip_address())

    def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind((self.address(), 0))
            return int(probe.getsockname()[1])

    def run(self, spec: RankSpec) -> int:
        return rank_process.run(spec)


class RayLauncher(Launcher):
    def __init__(self) -> None:
        if not ray.is_initialized():
            ray.init(address="auto")
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[asyncio.Task[None]] = []

    def bind(self) -> str:
        return f"tcp://{ray.util.get_node_ip_address()}:*"

    async def start(self, config: WorkerConfig, frontend: str, on_exit: OnExit) -> None:
        needs = {"CPU": 1, "GPU": int(config.device == "cuda")}
        self._group = ray.util.placement_group([needs] * config.num_ranks, strategy="PACK")
        await self._group.ready()
        environment = {"env_vars": caches.variables(config.cache_dir)}
        actor_class = ray.remote(num_cpus=needs["CPU"], num_gpus=needs["GPU"])(RankActor)
        for rank in range(config.num_ranks):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
            self._actors.append(actor_class.options(scheduling_strategy=place, runtime_env=environment).remote())
        addresses = [await actor.address.remote() for actor in self._actors]
        rendezvous = f"tcp://{addresses[0]}:{await self._actors[0].free_port.remote()}"
        for rank, (actor, address) in enumerate(zip(self._actors, addresses, strict=True)):
            spec = RankSpec(config, rank, frontend, f"tcp://{address}:*", rendezvous)
            self._runs.append(asyncio.create_task(_watch(rank, actor.run.remote(spec), on_exit)))

    async def stop(self, grace_s: float) -> None:
        if self._runs:
            await asyncio.wait(self._runs, timeout=grace_s)
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        self._actors, self._group = [], None


async def _watch(rank: int, run: Any, on_exit: OnExit) -> None:
    how = "its actor was cancelled"
    with contextlib.suppress(asyncio.CancelledError):
        try:
            how = f"exit code {await run}"
        except ray.exceptions.RayError as error:
            how = f"{type(error).__name__}: {error}"
    on_exit(rank, how)
