"""Millrace's servers in a duel: `millrace-pair`, `millrace-unified` (two workers), `millrace-single`."""

import functools
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from millrace_cli.cluster import HOST, ClusterSpec, server_command

from millrace_bench.duel.parts import ROUTER, Layout, Part
from millrace_bench.pd import POLICIES, limits
from millrace_bench.peers.sides import free_ports

RUNS = 100  # of one server, each as a tenant of its own: tenants share no cached prefix
HELD = r'^millrace_kv_pages\{[^}]*use="(?:running|published)"[^}]*\} (\S+)$'


def layout(prefill: int, decode: int, unified: int, args: Namespace, model: Path, max_len: int) -> Layout:
    """So many workers of each role. The file of API keys is put beside the model."""
    own = (f"device={args.device}", f"limits.max_model_len={max_len}", "random_weights=true", *args.worker_set)
    spec = ClusterSpec(prefill=prefill, decode=decode, unified=unified, worker_set=own)
    workers, addresses = [], []
    for name, role in spec.workers().items():
        grpc, metrics = free_ports(2)
        url = f"http://{HOST}:{metrics}"
        ports = (f"grpc_port={grpc}", f"metrics_port={metrics}")
        items = (*ports, f"engine={args.engine}", f"model={model}", *spec.settings(name))
        workers.append(Part(name, role, _command(role, items), f"{url}/ready", f"{url}/metrics"))
        addresses.append(f"{HOST}:{grpc}")
    keys = model.with_name("keys.json")
    keys.write_text(json.dumps({"keys": [{"name": f"run-{run}", "key": _key(run)} for run in range(RUNS)]}))
    (port,) = free_ports(1)
    url = f"http://{HOST}:{port}"
    items = (f"http={HOST}:{port}", f"model={model}", f"api_keys={keys}", f"workers={json.dumps(addresses)}")
    router = Part(ROUTER, ROUTER, _command(ROUTER, (*items, *POLICIES, *limits(args.slo))), f"{url}/ready")
    gpus = len(workers) if args.device == "cuda" else 0
    return Layout((*workers, router), url, gpus, HELD, lambda run: ({"authorization": f"Bearer {_key(run)}"}, {}))


def _key(run: int) -> str:
    return f"duel-{run:032}"


def _command(role: str, items: Sequence[str]) -> list[str]:
    return [*server_command(role), *(word for item in items for word in ("--set", item))]


SERVERS = {
    "millrace-pair": functools.partial(layout, 1, 1, 0),
    "millrace-unified": functools.partial(layout, 0, 0, 2),
    "millrace-single": functools.partial(layout, 0, 0, 1),
}
