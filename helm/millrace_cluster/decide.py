"""Decisions of the steps, made from the output of kubectl. No command is run here."""

import json
import re
from collections.abc import Iterable
from typing import Any

from millrace_cluster.tools import Failed

Object = dict[str, Any]
COMPONENT, INSTANCE = "app.kubernetes.io/component", "app.kubernetes.io/instance"
OURS = {"millrace/cluster-test": "true"}  # labels of the namespace
ROLES = ("prefill", "decode")
LOAD = "millrace-load"
ALWAYS = ("ServiceAccount/default", "ConfigMap/kube-root-ca.crt")  # every namespace has them, soon
UNLISTED = {"events", "events.events.k8s.io", "pods.metrics.k8s.io", "bindings"}


def namespace(name: str) -> Object:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": OURS}}


def check_free(found: Iterable[Object]) -> None:
    """Raise Failed if the namespace exists: an earlier run left it, or it belongs to something else."""
    for item in found:
        name, ours = item["metadata"]["name"], OURS.items() <= (item["metadata"].get("labels") or {}).items()
        left = f"left by an earlier run: kubectl delete namespace {name}"
        raise Failed(f"namespace {name} is there already, {left if ours else 'and not of this test: --namespace NAME'}")


def version(said: str) -> str:
    """Of the API server, from `kubectl version --output json`, as Helm takes it: 1.31.0."""
    found = re.match(r"v?(\d+\.\d+\.\d+)", json.loads(said).get("serverVersion", {}).get("gitVersion", ""))
    if found is None:
        raise Failed(f"the answer of the API server has no version: {said.strip()}")
    return found[1]


def serves(pod: Object) -> bool:
    """Whether it is a worker or router that is not going."""
    meta = pod["metadata"]
    return (meta.get("labels") or {}).get(COMPONENT) in ("router", *ROLES) and "deletionTimestamp" not in meta


def node_to_lose(nodes: Iterable[Object], pods: Iterable[Object]) -> str:
    """The node with the most workers. Failed where no other node could take them."""
    usable = sorted(node["metadata"]["name"] for node in nodes if _usable(node))
    if len(usable) < 2:
        raise Failed(f"two nodes that take pods are needed, here: {', '.join(usable) or 'none'}; or --skip node")
    placed = [pod["spec"].get("nodeName") for pod in pods if pod["metadata"]["labels"][COMPONENT] in ROLES]
    busiest = max(usable, key=placed.count)
    if busiest not in placed:
        raise Failed("no worker runs on a node that takes pods")
    return busiest


def _usable(node: Object) -> bool:
    spec = node.get("spec") or {}
    closed = any(taint["effect"] in ("NoSchedule", "NoExecute") for taint in spec.get("taints") or ())
    ready = any(it["type"] == "Ready" and it["status"] == "True" for it in node["status"].get("conditions") or ())
    return ready and not closed and not spec.get("unschedulable")


def ready(pods: Iterable[Object], without: str) -> int:
    """How many are ready on other nodes."""
    states = ((pod["spec"].get("nodeName"), (pod.get("status") or {}).get("conditions") or ()) for pod in pods)
    return sum(
        node != without and any(it["type"] == "Ready" and it["status"] == "True" for it in conditions)
        for node, conditions in states
    )


def on(node: str, pods: Iterable[Object]) -> list[str]:
    """Names of the pods of that node."""
    return [pod["metadata"]["name"] for pod in pods if pod["spec"].get("nodeName") == node]


def verdict(log: str) -> str:
    """What the load found, in words. Failed where a request failed or none was sent."""
    try:
        found = json.loads(log.strip().splitlines()[-1])
        sent, failed, reasons = found["sent"], found["failed"], found["reasons"]
    except (IndexError, KeyError, ValueError) as error:
        raise Failed(f"the load printed nothing that can be read: {log[-200:]!r}") from error
    if failed or not sent:
        raise Failed(f"{failed} of {sent} requests failed: {'; '.join(reasons) or 'none was sent'}")
    return f"{sent} requests, none failed"


def names(items: Iterable[Object]) -> dict[str, Object]:
    """Kind/name of each."""
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in items}


def left_behind(before: Iterable[Object], after: Iterable[Object]) -> tuple[list[str], list[str]]:
    """(what should be gone, what Helm leaves on purpose: objects of its hooks and those with the policy "keep")."""
    known = {*names(before), *ALWAYS}
    new = {name: item for name, item in names(after).items() if name not in known}
    kept = [name for name, item in new.items() if _kept(item)]
    return sorted(new.keys() - set(kept)), sorted(kept)


def _kept(item: Object) -> bool:
    notes = item["metadata"].get("annotations") or {}
    return "helm.sh/hook" in notes or notes.get("helm.sh/resource-policy") == "keep"


def listed(resources: str) -> str:
    """The argument for `kubectl get` from what `kubectl api-resources --output name` prints."""
    return ",".join(sorted(set(resources.split()) - UNLISTED))


def address(services: Iterable[Object]) -> str:
    """The URL of the router's HTTP port. Failed where no Service has one."""
    for service in services:
        spec = service["spec"]
        for port in spec["ports"]:
            if port.get("name") == "http" and spec.get("clusterIP") != "None":
                scheme = "https" if port.get("appProtocol") == "https" else "http"
                return f"{scheme}://{service['metadata']['name']}:{port['port']}"
    raise Failed("no Service of the router has a port http")


def load(router: Object, url: str, script: str) -> Object:
    """A list: of a pod that sends requests until /tmp/stop is there. `router`: the Deployment, for its image."""
    pod = router["spec"]["template"]["spec"]
    (image, *_) = (container["image"] for container in pod["containers"] if container["name"] == "router")
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
    container = {
        "name": "load",
        "image": image,
        "command": ["python3", "/load/load.py", "--url", url],
        "readinessProbe": {"exec": {"command": ["test", "-f", "/tmp/first"]}, "periodSeconds": 1},
        "securityContext": restricted,
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "volumeMounts": [{"name": "load", "mountPath": "/load"}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": pod["securityContext"],
        "containers": [container],
        "volumes": [{"name": "load", "configMap": {"name": LOAD}}, {"name": "tmp", "emptyDir": {}}],
        **({"imagePullSecrets": pod["imagePullSecrets"]} if pod.get("imagePullSecrets") else {}),
    }
    meta = {"name": LOAD, "labels": {"app.kubernetes.io/name": LOAD}}
    items = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"load.py": script}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec},
    ]
    return {"apiVersion": "v1", "kind": "List", "items": items}
