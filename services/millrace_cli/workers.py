"""`millrace workers`: a router's view of its workers."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence

import grpc
from google.protobuf.json_format import MessageToDict
from millrace.v1 import admin_pb2, worker_pb2
from millrace_rpc.enums import name_of
from millrace_rpc.tls import Identity
from rich.console import Console
from rich.table import Table

from millrace_cli import probe, proxies
from millrace_cli.errors import CommandError

# Fits 80 columns; an address is whole wherever it ends.
NARROW = ("role", "state", "routable", "running", "waiting", "pages free", "address")
PERIOD_S = 1.0
CLEAR = "\x1b[H\x1b[2J"  # a terminal


def row(worker: admin_pb2.WorkerStatus) -> dict[str, str]:
    """One line of the table, by column; numbers are sums over the worker's replicas."""
    replicas = worker.load.replicas
    free = sum(r.pages_free + r.pages_cached for r in replicas)
    drafts_accepted, accept_length = _drafts(replicas)
    state = name_of(worker_pb2.WorkerState, worker.load.state or worker.info.state)
    return {
        "role": name_of(worker_pb2.Role, worker.info.role),
        "state": state if worker.reachable else "unreachable",
        "routable": "yes" if worker.routable else "no",
        "running": str(sum(r.running for r in replicas)),
        "waiting": str(sum(r.waiting for r in replicas)),
        "pages free": f"{free}/{sum(r.pages_total for r in replicas)}",
        "capacity": str(sum(r.capacity for r in replicas)),
        "in flight": str(worker.in_flight),
        "drafts accepted": drafts_accepted,
        "accept length": accept_length,
        "expert imbalance": _experts(replicas[0]) if replicas else "",
        "weights": worker.info.weights_version,
        "epoch": worker.info.epoch[:8],
        "address": worker.address,
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


def text(workers: Sequence[admin_pb2.WorkerStatus], wide: bool) -> str:
    """A table, and below it why workers get no requests. Never cut to the terminal: somebody copies what is in it."""
    rows = [row(worker) for worker in workers]
    columns = tuple(row(admin_pb2.WorkerStatus())) if wide else NARROW
    table = Table(*columns, box=None, pad_edge=False)
    for one in rows:
        table.add_row(*(one[column] for column in columns))
    console = Console(markup=False, highlight=False, width=10_000)
    with console.capture() as shown:
        console.print(table)
    lines = [line.rstrip() for line in shown.get().splitlines()]
    reasons = [f"{worker.address}: {worker.detail}" for worker in workers if worker.detail and not worker.routable]
    return "\n".join([*lines, *reasons])


async def show(
    admin_address: str,
    wide: bool = False,
    as_json: bool = False,
    watch: bool = False,
    identity: Identity | None = None,
    token: str = "",
) -> None:
    while True:
        try:
            workers = await probe.listed(admin_address, identity, token)
        except grpc.RpcError as error:
            raise CommandError(await _why(admin_address, error)) from error
        if watch and sys.stdout.isatty():
            print(CLEAR, end="")
        if as_json:
            for worker in workers:
                print(json.dumps(MessageToDict(worker, preserving_proto_field_name=True)))
        else:
            print(text(workers, wide))
        if not watch:
            return
        await asyncio.sleep(PERIOD_S)


async def _why(address: str, error: grpc.RpcError) -> str:
    """The admin service did not answer; something else may."""
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return f"{address}: {error.details()}"
    return await probe.misdirected(address, error, "a router's admin port, 50052 by default") or (
        f"no router's admin service answers at {address}; give --address{proxies.hint()}"
    )
