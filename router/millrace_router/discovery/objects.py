"""Targets from Kubernetes objects in JSON. Pure.

Pod: its UID, its IP, a port, and whether it is Ready. EndpointSlice: the same for each of its endpoints, without the
pod's labels: there the Service has to select the leaders.
"""

import logging
from collections.abc import Callable, Iterable

from millrace_common.json_values import JsonObject
from millrace_common.log import survived

from millrace_router.config import KubernetesConfig
from millrace_router.discovery.base import Target, join, one_per_address

log = logging.getLogger(__name__)

Object = JsonObject
ROLES = ("prefill", "decode", "unified", "flexible")
ROLE_LABEL = "app.kubernetes.io/component"  # one of ROLES, until the worker reports its own
REVISION_LABEL = "millrace/revision"  # of a pod, or of an EndpointSlice: the revision of its pool
OVER = ("Failed", "Succeeded")  # phases of a pod that will never run again


def of_pod(pod: Object, config: KubernetesConfig) -> list[Target]:
    """Return the target, if any: not of a follower, nor of a pod without address or a finished one."""
    meta, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    labels, ip = meta.get("labels") or {}, status.get("podIP")
    name, _, leader = config.leader.partition("=")  # a pod without the label is a worker of one pod
    if labels.get(name, leader) != leader or not ip or status.get("phase") in OVER:
        return []
    entries = [entry for container in spec.get("containers", ()) for entry in container.get("ports") or ()]
    port = _port(entries, config.port, "containerPort")
    if port is None:
        log.warning("pod %s has no port named %r (kubernetes.port)", meta["name"], config.port)
        return []
    topology = {ours: labels[theirs] for ours, theirs in config.topology.items() if theirs in labels}
    topology = {"host": spec.get("nodeName", ""), **topology}
    role, revision = _pool(labels)
    return [Target(meta["uid"], join(ip, port), meta["name"], role, revision, _pod_withheld(pod), topology)]


def of_slice(slice: Object, config: KubernetesConfig) -> list[Target]:
    port = _port(slice.get("ports") or (), config.port, "port")
    if port is None:
        log.warning("EndpointSlice %s has no port named %r (kubernetes.port)", slice["metadata"]["name"], config.port)
        return []
    role, revision = _pool(slice["metadata"].get("labels") or {})  # labels of the Service
    targets = []
    for endpoint in slice.get("endpoints") or ():
        pod = endpoint.get("targetRef") or {}
        for ip in endpoint.get("addresses", ())[:1]:  # all addresses of an endpoint are the same pod
            address, withheld = join(ip, port), _endpoint_withheld(endpoint.get("conditions") or {})
            topology = {"host": endpoint.get("nodeName") or "", "zone": endpoint.get("zone") or ""}
            key, name = pod.get("uid") or address, pod.get("name", "")
            targets.append(Target(key, address, name, role, revision, withheld, topology))
    return targets


def _pool(labels: dict[str, str]) -> tuple[str, str]:
    """Role and revision."""
    role = labels.get(ROLE_LABEL, "")
    return role if role in ROLES else "", labels.get(REVISION_LABEL, "")


CONVERT: dict[str, Callable[[Object, KubernetesConfig], list[Target]]] = {"pods": of_pod, "endpointslices": of_slice}


class Store:
    """All objects of one selector by UID, kept up by lists and events."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self._convert = CONVERT[config.objects]
        self._found: dict[str, tuple[str, list[Target]]] = {}  # UID: time of creation, targets

    def replace(self, objects: Iterable[Object]) -> None:
        """Apply a full list: objects that it lacks are gone, even without an event."""
        self._found = {}
        for item in objects:
            self._put(item)

    def apply(self, kind: str, item: Object) -> None:
        """One event of a watch; bookmarks change nothing."""
        if kind == "DELETED":
            self._found.pop(item["metadata"]["uid"], None)
        elif kind in ("ADDED", "MODIFIED"):
            self._put(item)

    def targets(self) -> tuple[Target, ...]:
        """One per key (a pod that moves between slices is in both for a while) and one per address."""
        by_age = [targets for _, targets in sorted(self._found.values(), key=lambda found: found[0])]
        by_key: dict[str, Target] = {}
        for target in (target for targets in by_age for target in targets):
            if target.key not in by_key or not target.withheld:
                by_key[target.key] = target
        return one_per_address(by_key.values())

    @survived(log, "left out an object of the cluster that cannot be read")  # those behind it in a list come too
    def _put(self, item: Object) -> None:
        meta = item["metadata"]
        self._found[meta["uid"]] = meta.get("creationTimestamp") or "", self._convert(item, self._config)


def _pod_withheld(pod: Object) -> str:
    if pod["metadata"].get("deletionTimestamp"):
        return "the pod is terminating"
    for condition in pod.get("status", {}).get("conditions") or ():
        if condition["type"] == "Ready":
            if condition["status"] == "True":
                return ""
            return f"the pod is not Ready ({condition.get('reason') or 'no reason given'})"
    return "the pod is not Ready"


def _endpoint_withheld(conditions: dict[str, bool | None]) -> str:
    """Conditions that are absent mean: ready, not terminating."""
    if conditions.get("terminating"):
        return "the endpoint is terminating"
    return "the endpoint is not ready" if conditions.get("ready") is False else ""


def _port(entries: Iterable[Object], port: int | str, field: str) -> int | None:
    if isinstance(port, int):
        return port
    return next((int(e[field]) for e in entries if e.get("name") == port and e.get(field)), None)
