"""`millrace workers`: a router's view of its workers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from millrace.v1 import admin_pb2, worker_pb2
from millrace_rpc.tls import Identity
from rich.console import Console
from rich.table import Table

from millrace_cli import probe
from millrace_cli.errors import CommandError

COLUMNS = (
    "address",
    "role",
    "state",
    "routable",
    "running",
    "waiting",
    "pages free",
    "credits",
    "in flight",
    "drafts accepted",
    "accept length",
    "epoch",
)
MIN_WIDTH = 160  # also where the output is no terminal


def row(worker: admin_pb2.WorkerStatus) -> list[str]:
    """One line of the table; numbers are sums over the worker's replicas."""
    replicas = worker.load.replicas
    free = sum(r.pages_free + r.pages_cached for r in replicas)
    return [
        worker.address,
        worker_pb2.Role.Name(worker.info.role).removeprefix("ROLE_").lower(),
        probe.state_name(worker.load.state or worker.info.state) if worker.reachable else "unreachable",
        "yes" if worker.routable else f"no: {worker.detail}",
        str(sum(r.running for r in replicas)),
        str(sum(r.waiting for r in replicas)),
        f"{free}/{sum(r.pages_total for r in replicas)}",
        str(sum(r.credits for r in replicas)),
        str(worker.in_flight),
        *_drafts(replicas),
        worker.info.epoch[:8],
    ]


def _drafts(replicas: Sequence[worker_pb2.ReplicaLoad]) -> tuple[str, str]:
    """Share of accepted drafts, and mean tokens of a sequence per step with drafts, since the start. Empty: none."""
    if not (steps := sum(r.drafted[0] for r in replicas if r.drafted)):
        return "", ""
    drafted, accepted = sum(sum(r.drafted) for r in replicas), sum(sum(r.accepted) for r in replicas)
    return f"{accepted / drafted:.0%}", f"{1 + accepted / steps:.2f}"


async def show(admin_address: str, identity: Identity | None = None) -> None:
    workers = await probe.workers(admin_address, identity)
    if workers is None:
        raise CommandError(f"no router's admin service answers at {admin_address}; give --address")
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for worker in workers:
        table.add_row(*row(worker))
    Console(highlight=False, width=max(shutil.get_terminal_size().columns, MIN_WIDTH)).print(table)
