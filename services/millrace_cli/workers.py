"""`millrace workers`: a router's view of its workers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence

from millrace.v1 import admin_pb2, worker_pb2
from millrace_rpc.tls import Identity
from rich.console import Console
from rich.table import Table

from millrace_cli import probe, proxies
from millrace_cli.errors import CommandError

MIN_WIDTH = 160  # also where the output is no terminal


def row(worker: admin_pb2.WorkerStatus) -> dict[str, str]:
    """One line of the table, by column; numbers are sums over the worker's replicas."""
    replicas = worker.load.replicas
    free = sum(r.pages_free + r.pages_cached for r in replicas)
    drafts_accepted, accept_length = _drafts(replicas)
    return {
        "address": worker.address,
        "role": worker_pb2.Role.Name(worker.info.role).removeprefix("ROLE_").lower(),
        "state": probe.state_name(worker.load.state or worker.info.state) if worker.reachable else "unreachable",
        "weights": worker.info.weights_version,
        "routable": "yes" if worker.routable else f"no: {worker.detail}",
        "running": str(sum(r.running for r in replicas)),
        "waiting": str(sum(r.waiting for r in replicas)),
        "pages free": f"{free}/{sum(r.pages_total for r in replicas)}",
        "credits": str(sum(r.credits for r in replicas)),
        "in flight": str(worker.in_flight),
        "drafts accepted": drafts_accepted,
        "accept length": accept_length,
        "expert imbalance": _experts(replicas[0]) if replicas else "",
        "epoch": worker.info.epoch[:8],
    }


def _drafts(replicas: Sequence[worker_pb2.ReplicaLoad]) -> tuple[str, str]:
    """Share of accepted drafts, and mean tokens of a sequence per step with drafts, since the start. Empty: none."""
    if not (steps := sum(r.drafted[0] for r in replicas if r.drafted)):
        return "", ""
    drafted, accepted = sum(sum(r.drafted) for r in replicas), sum(sum(r.accepted) for r in replicas)
    return f"{accepted / drafted:.0%}", f"{1 + accepted / steps:.2f}"


def _experts(load: worker_pb2.ReplicaLoad) -> str:
    """Mean of the layers, the worst layer, and how old the placement is. Empty: not balanced."""
    if not (layers := load.expert_imbalance):
        return ""
    age = f", moved {time.time() - load.experts_moved_at:.0f} s ago" if load.experts_moved_at else ""
    return f"{sum(layers) / len(layers):.2f}, worst {max(layers):.2f}{age}"


async def show(admin_address: str, identity: Identity | None = None) -> None:
    workers = await probe.workers(admin_address, identity)
    if workers is None:
        raise CommandError(f"no router's admin service answers at {admin_address}; give --address{proxies.hint()}")
    table = Table(*row(admin_pb2.WorkerStatus()), box=None, pad_edge=False)
    for worker in workers:
        table.add_row(*row(worker).values())
    Console(markup=False, highlight=False, width=max(shutil.get_terminal_size().columns, MIN_WIDTH)).print(table)
