"""Values for tests of the Helm chart that the presets do not have: everything that is off by default, switched on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from millrace_chart.render import ROOT, Object, objects, preset_file, template

CPU = preset_file("cpu-tiny")
PAIR = preset_file("h200-1p1d-16gpu")
GROUPS = ROOT / "tests" / "helm" / "groups.yaml"
GIVEN = "secret.secretName=given"  # the text that the chart makes differs each time
PLAIN = "tls.mode=off"  # and so do certificates
NO_DASHBOARDS = "monitoring.dashboards.enabled=false"  # large, and the same in every variant
HPA = ("autoscaling.kind=hpa", "replicas=null")
KEDA = ("autoscaling.kind=keda", "replicas=null")
VARIANTS: dict[str, tuple[Path, tuple[str, ...]]] = {
    "tls": (CPU, ("tls.mode=certManager",)),
    "issuer": (CPU, ("tls.mode=certManager", "tls.issuerRef.name=ours", "tls.issuerRef.kind=ClusterIssuer")),
    "secrets": (
        CPU,
        ("tls.mode=secrets", "tls.routerSecret=r", "tls.workerSecret=w", "tls.publicSecret=web"),
    ),
    "keys": (CPU, ("apiKeys.secretName=keys", "apiKeys.allowPlaintext=true", "test.apiKey.secretName=test-key")),
    "slices": (CPU, ("discovery.objects=endpointslices",)),
    "statefulset": (CPU, ("workerDefaults.kind=statefulset",)),
    "groups": (GROUPS, ()),
    "cpu-groups": (CPU, tuple(f"workers.decode.{item}" for item in ("kind=lws", "size=2", "dp=2"))),
    "hpa": (CPU, tuple(f"{at}.{item}" for at in ("router", "workerDefaults") for item in HPA)),
    "keda": (PAIR, tuple(f"workerDefaults.{item}" for item in KEDA)),
    "keda-groups": (GROUPS, tuple(f"workerDefaults.{item}" for item in KEDA)),
    "rack": (
        GROUPS,
        (
            "workers.prefill.topology.key=rack",
            "workers.decode.topology.key=rack",
            "workers.decode.topology.mode=required",
        ),
    ),
    "own-rack": (GROUPS, ("workerDefaults.topology.key=rack", "workerDefaults.topology.mode=exclusive")),
    "kueue": (GROUPS, ("workerDefaults.gang.kind=kueue", "workerDefaults.gang.queue=gpus")),
    "volcano": (PAIR, ("workerDefaults.gang.kind=volcano", "workerDefaults.gang.queue=gpus")),
    "volcano-groups": (GROUPS, ("workerDefaults.gang.kind=volcano", "workerDefaults.gang.queue=gpus")),
    "root": (PAIR, ("podSecurity.workersAsRoot=true",)),
    "warm": (PAIR, ("cache.kind=pvc", "cache.claim=cache", "cache.warm=true")),
    "ipv6": (CPU, ("ipFamily=IPv6",)),
    "next": (  # a new version beside the old one
        CPU,
        tuple(
            f"workers.{role}-b.{item}"
            for role in ("prefill", "decode")
            for item in (
                f"role={role}",
                "revision=b",
                "image.tag=0.2.0-cpu",
                "config.limits.page_size=32",
                "model.path=/opt/b",
            )
        ),
    ),
    "extended": (ROOT / "tests" / "helm" / "extended.yaml", ()),
    "route": (
        CPU,
        (
            "gateway.httpRoute.enabled=true",
            "gateway.httpRoute.parentRefs[0].name=gateway",
            "gateway.inferencePool.enabled=true",
            "gateway.inferencePool.endpointPicker.name=picker",
        ),
    ),
    "policies": (
        CPU,
        (
            "networkPolicy.clients[0].namespaceSelector.matchLabels.team=a",
            "networkPolicy.monitoring[0].namespaceSelector.matchLabels.team=b",
        ),
    ),
    "egress": (
        CPU,
        (
            "networkPolicy.egress.enabled=true",
            "tracing.endpoint=http://collector.tracing:4319",
            "workers.decode.ports.grpc=6",
        ),
    ),
    "hf": (CPU, ("model.source=hf", "model.uri=a/b", "model.path=c", "model.claim=d", "model.secretName=e")),
    "s3": (CPU, ("model.source=s3", "model.uri=s3://a/b", "model.path=c", "model.claim=d")),
    "oci": (CPU, ("model.source=oci", "model.uri=a/b:1", "model.path=c", "model.claim=d", "model.secretName=e")),
    "host": (CPU, ("model.source=hostPath", "model.hostPath=/models", "cache.kind=pvc", "cache.claim=cache")),
    "privileged": (PAIR, ("fabric.privileged=true", "fabric.acknowledgePrivileged=true")),
    "tcp": (PAIR, ("fabric.preset=tcp-dev", "fabric.allowTcp=true")),
    **{
        name: (PAIR, (f"fabric.preset={name}", "workerDefaults.gpuModel=H200"))
        for name in ("roce", "gke-rdma", "gke-gib", "aks-ib", "coreweave")
    },
    "aws-efa": (PAIR, ("fabric.preset=aws-efa", "images.gpuWorker.repository=worker-efa")),
}


def rendered(name: str, *more: str) -> list[Object]:
    """The objects of a preset or a variant, with further --set items."""
    if name not in VARIANTS:
        return objects(template((preset_file(name),), more))
    file, sets = VARIANTS[name]
    return objects(template((file,), (NO_DASHBOARDS, *sets, *more)))


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
