"""What the chart installs from a preset, as a system of this machine: its workers and router with the same settings.

Helm renders a file of values; a file of manifests, such as k8s/golden/NAME.yaml, needs none. What only a cluster has is
left out: addresses, certificates, folders. dp of GPU workers is scaled to the GPUs there are.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from millrace_cli.cluster import ClusterSpec

from millrace_bench.data import read_data

ROLES = ("prefill", "decode", "unified")
OF_CLUSTER: dict[str, list[str]] = read_data("of-cluster.yaml")  # keys that the chart sets for its pods
Json = dict[str, Any]


class PresetError(Exception):
    """The file is no preset, or its workers do not fit the GPUs; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers of one role. config: as installed, without what only a cluster has."""

    role: str
    replicas: int
    config: Json

    @property
    def num_ranks(self) -> int:
        """Of all of its workers."""
        return int(self.replicas * self.config["dp"] * self.config["tp"])

    @property
    def settings(self) -> tuple[str, ...]:
        """`--set` items."""
        return tuple(_flat(self.config))


@dataclass(frozen=True, slots=True)
class Preset:
    pools: tuple[Pool, ...]
    router_set: tuple[str, ...]

    def scaled(self, gpus: int) -> "Preset":
        """With as many replicas in each GPU worker as `gpus` have room for. Raises PresetError."""
        wanted = sum(pool.num_ranks for pool in self.pools if pool.config["device"] == "cuda")
        return replace(self, pools=tuple(_scaled(pool, gpus, wanted) for pool in self.pools))

    def spec(self, more: Sequence[str], **facts: Any) -> ClusterSpec:
        """`more`: `--set` items of every worker, over the preset's. `facts`: of ClusterSpec."""
        counts: Json = dict.fromkeys(ROLES, 0) | {pool.role: pool.replicas for pool in self.pools}
        by_role = {pool.role: (*pool.settings, *more) for pool in self.pools}
        return ClusterSpec(**counts, role_set=by_role, router_set=self.router_set, **facts)


def load(file: Path) -> Preset:
    """Raises PresetError."""
    items = [item for item in _manifests(file) if item]
    replicas = {_pool(item): item["spec"].get("replicas") or 1 for item in items if "template" in _spec(item)}
    pools: list[Pool] = []
    router: tuple[str, ...] = ()
    for item in items:
        role = item.get("metadata", {}).get("labels", {}).get("app.kubernetes.io/component")
        text = item.get("data", {}).get("config.yaml") if item.get("kind") == "ConfigMap" else None
        if text is None:
            continue
        config = {key: value for key, value in yaml.safe_load(text).items() if key not in OF_CLUSTER["worker"]}
        if role in ROLES:
            pools.append(Pool(role, replicas.get(_pool(item), 1), config))
        elif role == "router":
            router = tuple(_flat({key: value for key, value in config.items() if key not in OF_CLUSTER["router"]}))
    if not pools or len({pool.role for pool in pools}) < len(pools):
        raise PresetError(f"{file}: {len(pools)} pools of workers; a bench takes one of each role")
    return Preset(tuple(pools), router)


def _manifests(file: Path) -> list[Json]:
    try:
        documents = list(yaml.safe_load_all(file.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PresetError(f"cannot read {file}: {error}") from error
    if any(isinstance(one, dict) and "kind" in one for one in documents):
        return documents
    from millrace_chart.render import ChartError, template  # of the source tree; a GPU host has no Helm

    try:
        return list(yaml.safe_load_all(template((file.absolute(),))))
    except ChartError as error:
        raise PresetError(f"{file}: {error}") from error


def _spec(item: Json) -> Json:
    """Of a workload; a LeaderWorkerSet's template has another name."""
    spec: Json = item.get("spec") or {}
    return {**spec, "template": None} if "leaderWorkerTemplate" in spec else spec


def _pool(item: Json) -> str:
    return str(item["metadata"].get("labels", {}).get("millrace/pool"))


def _scaled(pool: Pool, gpus: int, wanted: int) -> Pool:
    if pool.config["device"] != "cuda" or wanted <= gpus:
        return pool
    dp, rest = divmod(pool.config["dp"] * gpus, wanted)
    if rest or not dp:
        workers = f"{pool.replicas} {pool.role} worker(s) of dp={pool.config['dp']}"
        raise PresetError(f"{workers} of {wanted} GPUs cannot be scaled to {gpus}")
    return replace(pool, config={**pool.config, "dp": dp})


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value)}"
