"""What an API server refuses to change in an object that is there. Helm fails an upgrade that tries."""

from collections.abc import Iterable, Iterator
from typing import Any

from millrace_testing import kube_schema

Object = dict[str, Any]
# Kind: fields that must stay; for a StatefulSet: the only ones that may change.
FIXED: dict[str, tuple[str, ...]] = {
    "Deployment": ("spec.selector",),
    "Job": ("spec.selector", "spec.template", "spec.completions", "spec.completionMode", "spec.podFailurePolicy"),
    "Service": ("spec.clusterIP",),
    "PersistentVolumeClaim": ("spec.accessModes", "spec.storageClassName", "spec.volumeMode", "spec.volumeName"),
    "RoleBinding": ("roleRef",),
    "ClusterRoleBinding": ("roleRef",),
    "Secret": ("type",),
    "LeaderWorkerSet": ("spec.leaderWorkerTemplate.subGroupPolicy",),
}
STATEFUL_SET = {
    *("minReadySeconds", "ordinals", "persistentVolumeClaimRetentionPolicy", "replicas", "revisionHistoryLimit"),
    *("template", "updateStrategy"),
}


def refused(before: Iterable[Object], after: Iterable[Object]) -> Iterator[str]:
    """Why an upgrade from one render to the next would be refused. Warmups are left out: Helm deletes those first."""
    known = {_key(item): item for item in before}
    for item in after:
        old = known.get(_key(item))
        if old is None or "helm.sh/hook" in (item["metadata"].get("annotations") or {}):
            continue
        name = f"{item['kind']} {item['metadata']['name']}"
        yield from (f"{name}: {path} is immutable" for path in _changed(old, item))
        yield from (f"{name}: {problem}" for problem in kube_schema.check(item, old))


def _changed(old: Object, new: Object) -> Iterator[str]:
    if new["kind"] == "StatefulSet":
        for field in sorted(({*old["spec"]} | {*new["spec"]}) - STATEFUL_SET):
            if old["spec"].get(field) != new["spec"].get(field):
                yield f"spec.{field}"
    for path in FIXED.get(new["kind"], ()):
        if _at(old, path) != _at(new, path):
            yield path
    if old.get("immutable") and (old.get("data"), old.get("immutable")) != (new.get("data"), new.get("immutable")):
        yield "data"


def _at(item: Object, path: str) -> Any:
    found: Any = item
    for name in path.split("."):
        found = (found or {}).get(name)
    return found


def _key(item: Object) -> tuple[str, ...]:
    return item["apiVersion"], item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]
