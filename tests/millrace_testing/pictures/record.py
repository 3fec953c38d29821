"""A local cluster of simulated engines under load, one of whose workers hangs for a while, as its boards ask for it.

A real Prometheus scrapes the processes and evaluates the rules. Then every query of the boards is asked for the whole
time, and what it answers is kept.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from millrace_cli.cluster import ClusterSpec, LocalCluster
from millrace_cli.process import EXEC_GUARD
from millrace_dashboards.alert import Deployment, Thresholds
from millrace_dashboards.files import rendered
from millrace_dashboards.promql import WHERE

from millrace_testing.prometheus import Prometheus, Target, free_port

OF = Deployment("serving", "tiny", "millrace")
# Short windows, so that alerts of a fault of a minute are seen. The limits are those of the chart.
THRESHOLDS = Thresholds(window="30s", long_window="2m", restart_window="5m", patience="10s")
PHASES_S = (150.0, 45.0, 105.0)  # before the fault, with it, and after it
HANGS = "decode-1"
NOT_ON_CPU = "MillraceKvSlow"  # the chart leaves it out
STEP_S, RATE = 2, "20s"  # of ranges, and Grafana's $__rate_interval
WORKER = (  # an engine like an H200's, with drafts and a tier in the host's memory
    *("sim.step_s=0.0145", "sim.token_s=0.000085", "sim.sequence_s=0.00026"),
    *("limits.draft_tokens=2", "limits.num_pages=1500", "limits.host_cache_gib=0.02"),
)
LOADS = (  # options of `millrace bench serving`: more requests than the recording has time for
    "--api grpc --request-rate 1.5 --num-requests 600 --multi-turn 3 --shared-prefix 0.8:600 --output-len 150:300",
    "--api http --request-rate 3 --num-requests 1200 --input-len 200:1500 --output-len 50:150",
)
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recording:
    """`boards`: their JSON. `answers`: query → series with their samples, at `start` and every `step` seconds."""

    start: float  # Unix time
    end: float
    step: int
    boards: list[Json]
    answers: dict[str, list[Json]]

    def to_json(self) -> str:
        return json.dumps(asdict(self))


async def record(folder: Path, phases: tuple[float, float, float] = PHASES_S) -> Recording:
    """`folder`: for logs and Prometheus's data. `phases`: seconds as in PHASES_S."""
    calm, hang, after = phases
    files = rendered(THRESHOLDS, of=OF)
    boards = [json.loads(text) for name, text in files.items() if name.endswith(".json")]
    metrics = f"127.0.0.1:{free_port()}"
    spec = ClusterSpec(2, 2, engine="sim", worker_set=WORKER, router_set=(f"metrics={metrics}",), log_dir=folder)
    start = time.time()
    async with LocalCluster(spec) as cluster:
        addresses = {name: cluster.address(name, "metrics") for name in spec.workers()} | {"router": metrics}
        targets = [_target(name, role, addresses[name]) for name, role in cluster.roles.items()]
        async with Prometheus(folder / "prometheus", _rules(files["alerts.yaml"]), targets) as prometheus:
            async with _load(cluster):
                await asyncio.sleep(calm)
                cluster.processes[HANGS].send(signal.SIGSTOP)
                await asyncio.sleep(hang)
                cluster.processes[HANGS].send(signal.SIGCONT)
                await asyncio.sleep(after)
            end = time.time()
            answers = {query: await prometheus.range(_all(query), start, end, STEP_S) for query in queries(boards)}
    return Recording(start, end, STEP_S, boards, answers)


def queries(boards: list[Json]) -> set[str]:
    """Of panels and marks."""
    targets = {target["expr"] for board in boards for panel in board["panels"] for target in panel.get("targets", ())}
    return targets | {mark["expr"] for board in boards for mark in board["annotations"]["list"]}


def _all(query: str) -> str:
    """With everything chosen in every variable."""
    chosen = query.replace("$__rate_interval", RATE)
    for name in (*WHERE, "pod", "role"):
        chosen = chosen.replace(f"${name}", ".*")
    return chosen


def _target(name: str, role: str, address: str) -> Target:
    """With the labels that the chart's monitors set."""
    return Target(address, {**asdict(OF), "component": role, "pod": f"millrace-{name}"})


def _rules(text: str) -> str:
    rules = yaml.safe_load(text)
    for group in rules["groups"]:
        group["rules"] = [rule for rule in group["rules"] if rule.get("alert") != NOT_ON_CPU]
    return yaml.safe_dump(rules)


@contextlib.asynccontextmanager
async def _load(cluster: LocalCluster) -> AsyncIterator[None]:
    """Clients that do not outlive this process, and must not end before they are stopped."""
    clients = []
    for number, load in enumerate(LOADS):
        address = cluster.grpc_address if "grpc" in load else cluster.http_url
        guard = (sys.executable, "-S", str(EXEC_GUARD), str(os.getpid()))
        command = (sys.executable, "-m", "millrace_load.serving", "--address", address, "--ignore-eos", *load.split())
        with (cluster.log_dir / f"load-{number}.log").open("wb") as log:
            clients.append(await asyncio.create_subprocess_exec(*guard, *command, stdout=log, stderr=log))
    try:
        yield
        assert all(client.returncode is None for client in clients), f"see the logs of the load in {cluster.log_dir}"
    finally:
        for client in clients:
            with contextlib.suppress(ProcessLookupError):
                client.kill()
            await client.wait()
