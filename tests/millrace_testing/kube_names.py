"""What an API server checks in code and not by a schema: names, labels, ports, quantities, selectors, resources."""

import contextlib
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

Object = dict[str, Any]
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
PORT = re.compile(r"(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*")
VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
# A StatefulSet's name and a hash of 10 go into one label of 63; a LeaderWorkerSet adds the number of its group.
NAMES: dict[str, tuple[re.Pattern[str], int]] = {
    "Service": (LABEL_1035, 63),
    "LeaderWorkerSet": (LABEL_1035, 49),
    "StatefulSet": (SUBDOMAIN, 52),
    "Job": (SUBDOMAIN, 63),
    "Pod": (SUBDOMAIN, 63),
}
ANNOTATIONS = 256 * 1024  # bytes of an object's keys and values


def problems(item: Object) -> Iterator[str]:
    pattern, longest = NAMES.get(item["kind"], (SUBDOMAIN, 253))
    name = item.get("metadata", {}).get("name", "")
    if not item["apiVersion"].startswith("rbac.") and not (pattern.fullmatch(name) and len(name) <= longest):
        yield f"metadata.name: {name!r} is no name of a {item['kind']} (at most {longest} characters)"
    for path, node in _dicts(item, ""):
        yield from _metadata(path, node)
        yield from _quantities(path, node)
        if isinstance(node.get("containers"), list):
            yield from _pod(path, node)
    yield from _selector(item.get("spec") or {})


def _dicts(node: Any, path: str) -> Iterator[tuple[str, Object]]:
    if isinstance(node, dict):
        yield path, node
        for name, each in node.items():
            yield from _dicts(each, f"{path}.{name}".lstrip("."))
    elif isinstance(node, list):
        for index, each in enumerate(node):
            yield from _dicts(each, f"{path}[{index}]")


def _metadata(path: str, node: Object) -> Iterator[str]:
    if path.rsplit(".", 1)[-1] == "metadata":
        annotations = node.get("annotations") or {}
        for key in annotations:
            if not _qualified(key):
                yield f"{path}.annotations: {key!r} is no key"
        if sum(len(key.encode()) + len(str(value).encode()) for key, value in annotations.items()) > ANNOTATIONS:
            yield f"{path}.annotations: more than {ANNOTATIONS} bytes"
        yield from _labels(f"{path}.labels", node.get("labels") or {})
    for name in ("matchLabels", "nodeSelector"):
        if isinstance(node.get(name), dict) and "nodeSelectorTerms" not in node[name]:
            yield from _labels(f"{path}.{name}", node[name])


def _labels(path: str, labels: Object) -> Iterator[str]:
    for key, value in labels.items():
        if not _qualified(key):
            yield f"{path}: {key!r} is no key"
        if value and (len(value) > 63 or not QUALIFIED.fullmatch(value)):
            yield f"{path}.{key}: {value!r} is no value of a label"


def _qualified(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    return (
        len(name) <= 63
        and bool(QUALIFIED.fullmatch(name))
        and (not slash or (len(prefix) <= 253 and bool(SUBDOMAIN.fullmatch(prefix))))
    )


def _pod(path: str, spec: Object) -> Iterator[str]:
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    names = [each.get("name", "") for each in containers]
    for name in [*names, *(each.get("name", "") for each in spec.get("volumes") or ())]:
        if not (LABEL.fullmatch(name) and len(name) <= 63):
            yield f"{path}: {name!r} is no name of a container or volume"
    if len(names) != len(set(names)):
        yield f"{path}: two containers have one name: {sorted(names)}"
    for each in containers:
        where = f"{path}.{each.get('name')}"
        ports = [port["name"] for port in each.get("ports") or () if "name" in port]
        for port in ports:
            if not (PORT.fullmatch(port) and len(port) <= 15):
                yield f"{where}: {port!r} is no name of a port (at most 15 characters)"
        if len(ports) != len(set(ports)):
            yield f"{where}: two ports have one name: {sorted(ports)}"
        for variable in each.get("env") or ():
            if not VARIABLE.fullmatch(variable["name"]):
                yield f"{where}: {variable['name']!r} is no name of a variable"
        yield from _resources(where, each.get("resources") or {})


def _resources(path: str, resources: Object) -> Iterator[str]:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for name, asked in requests.items():
        extended = "/" in name and not name.startswith("kubernetes.io/")
        if extended and limits.get(name) is None:
            yield f"{path}: {name} has a request and no limit"
        elif name in limits:
            asks, has = amount(asked), amount(limits[name])
            if asks is not None and has is not None and (asks > has or (extended and asks != has)):
                yield f"{path}: {name} asks for {asked} with a limit of {limits[name]}"


def _quantities(path: str, node: Object) -> Iterator[str]:
    for name in ("limits", "requests"):
        if path.endswith("resources") and isinstance(node.get(name), dict):
            for key, value in node[name].items():
                if amount(value) is None:
                    yield f"{path}.{name}.{key}: {value!r} is no quantity"
    if "sizeLimit" in node and amount(node["sizeLimit"]) is None:
        yield f"{path}.sizeLimit: {node['sizeLimit']!r} is no quantity"


def amount(value: Any) -> Decimal | None:
    """None where the value is no quantity."""
    with contextlib.suppress(ValueError):
        return parse_quantity(str(value))
    return None


def _selector(spec: Object) -> Iterator[str]:
    """A Deployment or StatefulSet must select the pods that it makes."""
    if "template" in spec and "matchLabels" in (spec.get("selector") or {}):
        labels = spec["template"].get("metadata", {}).get("labels") or {}
        for key, value in spec["selector"]["matchLabels"].items():
            if labels.get(key) != value:
                yield f"spec.selector: {key}={value} is not in the labels of the template"
