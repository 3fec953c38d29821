"""Renders of the Helm chart: presets, variants of them (tests/helm/variants.yaml), and what is in them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from millrace_chart.render import ROOT, Object, objects, preset_file, presets, template

CPU = preset_file("cpu-tiny")
PAIR = preset_file("h200-1p1d-16gpu")
GROUPS = ROOT / "tests" / "helm" / "groups.yaml"
GIVEN = "secret.secretName=given"  # the text that the chart makes differs each time
PLAIN = "tls.mode=off"  # and so do certificates
NO_DASHBOARDS = "monitoring.dashboards.enabled=false"  # large, and the same in every variant
HPA = ("autoscaling.kind=hpa", "replicas=null")
KEDA = ("autoscaling.kind=keda", "replicas=null")
FILES = {"cpu": CPU, "pair": PAIR, "groups": GROUPS, "extended": ROOT / "tests" / "helm" / "extended.yaml"}
VARIANTS: dict[str, tuple[Path, tuple[str, ...]]] = {  # everything that is off by default, switched on
    name: (FILES[file], tuple(sets))
    for name, (file, *sets) in yaml.safe_load((ROOT / "tests" / "helm" / "variants.yaml").read_text()).items()
}
TABLES: dict[str, Any] = yaml.safe_load((ROOT / "tests" / "helm" / "found.yaml").read_text())
EVERYTHING = [*presets(), *VARIANTS]


def rendered(name: str, *more: str) -> list[Object]:
    """The objects of a preset or a variant without dashboards, with further --set items."""
    file, sets = VARIANTS[name] if name in VARIANTS else (preset_file(name), ())
    return objects(template((file,), (NO_DASHBOARDS, *sets, *more)))


def spec_of(items: Iterable[Object], where: str = "Deployment/demo-millrace-decode") -> Object:
    """The spec of the pods of an object, by kind and name."""
    (spec,) = (spec for name, spec in pods(items) if name == where)
    return spec


def named(items: Iterable[Object], kind: str, name: str) -> Object:
    (found,) = (item for item in of_kind(items, kind) if item["metadata"]["name"] == name)
    return found


def of_kind(items: Iterable[Object], *kinds: str) -> list[Object]:
    return [item for item in items if item["kind"] in kinds]


def files_of(items: Iterable[Object], name: str) -> dict[str, str]:
    """What the pods of a router or a pool mount as their configuration and scripts, by the name of its objects."""
    (found,) = (it for it in of_kind(items, "ConfigMap") if it["metadata"]["labels"].get("millrace/files") == name)
    return found["data"]


def config_of(items: Iterable[Object], name: str) -> dict[str, Any]:
    return yaml.safe_load(files_of(items, name)["config.yaml"])


def pods(items: Iterable[Object]) -> list[tuple[str, Object]]:
    """Every pod of every object with a name for it: (where, spec)."""
    found = []
    for item in items:
        name, spec = f"{item['kind']}/{item['metadata']['name']}", item.get("spec") or {}
        if item["kind"] == "Pod":
            found.append((name, spec))
        elif item["kind"] == "LeaderWorkerSet":
            template = spec["leaderWorkerTemplate"]
            found += [(f"{name}/{part}", template[part]["spec"]) for part in ("leaderTemplate", "workerTemplate")]
        elif "template" in spec:
            found.append((name, spec["template"]["spec"]))
    return found
