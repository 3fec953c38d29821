"""Ranks as Ray actors, one per bundle of a placement group, for workers that span hosts. Ray is imported here only.

The actors belong to the frontend's Ray job: Ray ends them with the job, however the frontend ends.
"""

import asyncio
import contextlib
import importlib
import logging
import socket
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from millrace_serve.worker import caches
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.launcher import Launcher, OnExit
from millrace_serve.worker.rank import process as rank_process
from millrace_serve.worker.rank.parts import RankSpec

log = logging.getLogger(__name__)

WAIT_LOG_S = 5.0
RayObject = Any  # Ray has types for few of its objects


def start_hook(params: RayObject, head: bool) -> None:
    """Adjust Ray before `ray start` ($RAY_START_HOOK of our pods), beyond its options.

    Ray Client is off, because it runs any code that is sent to it, and so is the autoscaler. The raylet gets the port
    of its dashboard agent: without it a node ends itself unless the agent reports a port within 15 seconds, which is
    too short on a busy machine. Ray has no setting for that (its issue 65983), only a private function, and a Ray
    without the function starts as it would by itself.
    """
    params.ray_client_server_port = None
    params.no_monitor = True
    port = getattr(params, "dashboard_agent_listen_port", None)
    services: RayObject = None
    with contextlib.suppress(ImportError):
        services = importlib.import_module("ray._private.services")
    start = getattr(services, "start_ray_process", None)
    if start is None or port is None:
        log.warning("this Ray cannot be told its ports: a node whose agent takes more than 15 s ends and is restarted")
        return

    def start_with_port(command: list[str], process_type: str, *args: object, **options: object) -> object:
        if process_type == "raylet":
            command = [*command, f"--dashboard_agent_listen_port={port}"]
        return start(command, process_type, *args, **options)

    services.start_ray_process = start_with_port


class RankActor:
    """Runs in its own process, on the host that Ray chose."""

    def address(self) -> str:
        return str(ray.util.get_node_ip_address())

    def free_port(self) -> int:
        address = self.address()
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])

    def run(self, spec: RankSpec) -> int:
        return rank_process.run(spec)


class RayLauncher(Launcher):
    def __init__(self) -> None:
        if not ray.is_initialized():
            ray.init(address="auto")
        self._group: RayObject = None
        self._actors: list[RayObject] = []
        self._runs: list[asyncio.Task[None]] = []

    def bind(self) -> str:
        return endpoint(ray.util.get_node_ip_address(), "*")

    async def start(self, config: WorkerConfig, frontend: str, group: str, on_exit: OnExit) -> None:
        needs = {"CPU": 1, "GPU": int(config.device == "cuda")}
        self._group = ray.util.placement_group([needs] * config.num_ranks, strategy="PACK")
        await _placed(self._group, config.num_ranks)
        environment = {"env_vars": caches.variables(config.cache_dir)}
        actor_class = ray.remote(num_cpus=needs["CPU"], num_gpus=needs["GPU"])(RankActor)
        for rank in range(config.num_ranks):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
            self._actors.append(actor_class.options(scheduling_strategy=place, runtime_env=environment).remote())
        addresses = [await actor.address.remote() for actor in self._actors]
        rendezvous = endpoint(addresses[0], await self._actors[0].free_port.remote())
        for rank, (actor, address) in enumerate(zip(self._actors, addresses, strict=True)):
            spec = RankSpec(config, rank, frontend, endpoint(address, "*"), rendezvous, group)
            self._runs.append(asyncio.create_task(_watch(rank, address, actor.run.remote(spec), on_exit)))

    async def stop(self, grace_s: float) -> None:
        if self._runs:
            await asyncio.wait(self._runs, timeout=grace_s)
        for actor in self._actors:
            ray.kill(actor)
        for run in self._runs:
            run.cancel()
        await asyncio.gather(*self._runs)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        self._actors, self._runs, self._group = [], [], None


def endpoint(address: str, port: int | str) -> str:
    """The endpoint for ZeroMQ and torch's rendezvous, which both need an IPv6 address in brackets."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


async def _placed(group: RayObject, ranks: int) -> None:
    """Wait until every rank has its place: the other pods have joined."""
    ready = asyncio.ensure_future(group.ready())
    while not (await asyncio.wait({ready}, timeout=WAIT_LOG_S))[0]:
        pods = sum(node["Alive"] for node in ray.nodes())
        log.warning("waiting for pods: Ray has %d, too few for %d ranks", pods, ranks)
    await ready


async def _watch(rank: int, address: str, run: RayObject, on_exit: OnExit) -> None:
    how = "its actor was cancelled"
    with contextlib.suppress(asyncio.CancelledError):
        try:
            how = f"exit code {await run}"
        except Exception as error:  # Ray's own, or any other: a rank whose end nobody hears of would be waited for
            how = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    on_exit(rank, f"on {address}: {how}")
