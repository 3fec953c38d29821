"""What the chart renders: valid for every Kubernetes, the same with the oldest helm, and as it was committed."""

import json

import kubernetes_validate
import pytest
from millrace_chart.render import (
    CHART,
    OPERATOR,
    ROOT,
    Object,
    preset_file,
    presets,
    run,
    template,
    written,
)
from millrace_testing import kube_schema
from millrace_testing.charts import EVERYTHING, GIVEN, NO_DASHBOARDS, PLAIN, VARIANTS, of_kind, pods, rendered

pytestmark = pytest.mark.helm
_valid: set[str] = set()  # objects


@pytest.mark.parametrize("values", [(), ("--values", str(preset_file("h200-4p-9d")))])
def test_lint_of_the_chart_finds_nothing(values: tuple[str, ...]) -> None:
    assert "0 chart(s) failed" in run(["lint", "--strict", str(CHART), *values])


def test_golden_files_are_what_the_chart_renders() -> None:
    for path, text in written():
        assert path.is_file() and path.read_text() == text, f"{path.relative_to(ROOT)}: run `make golden`"
    assert {path.stem for path in (ROOT / "k8s" / "golden").glob("*.yaml")} == set(presets())


@pytest.mark.helm("oldest")
@pytest.mark.parametrize("name", ["hpa", "groups", "extended", "gke-gib", "aws-efa", "egress"])
def test_oldest_helm_renders_the_same(name: str) -> None:
    """Certificates and texts that the chart makes differ each time."""
    file, sets = VARIANTS[name]
    old, new = (
        template((file,), (*sets, GIVEN, "ray.auth.secretName=given", PLAIN, NO_DASHBOARDS), which)
        for which in ("oldest", "helm")
    )
    assert old == new


@pytest.mark.parametrize("name", EVERYTHING)
def test_object_is_valid(name: str) -> None:
    """As kube_schema.py checks it; what many have alike once."""
    for item in rendered(name):
        text = json.dumps(item, sort_keys=True)
        if text not in _valid:
            _valid.add(text)
            assert kube_schema.check(item) == [], f"{item['kind']} {item['metadata']['name']}"


@pytest.mark.parametrize("version", ["1.29", "1.33"])
def test_object_is_valid_for_older_kubernetes(version: str) -> None:
    seen = set()
    for name in ("hpa", "statefulset", "extended", "h200-1p1d-16gpu"):
        for item in rendered(name):
            if item["apiVersion"] != OPERATOR and (name.startswith("h200") or item["kind"] not in seen):
                seen.add(item["kind"])
                kubernetes_validate.validate(item, version, strict=True)
    assert {"Deployment", "StatefulSet", "HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget"} <= seen


@pytest.mark.parametrize("name", EVERYTHING)
def test_pod_is_locked_down(name: str) -> None:
    for where, spec in pods(rendered(name)):
        as_root = name == "root" and "router" not in where and "test" not in where
        assert spec["securityContext"]["runAsNonRoot"] is not as_root, where
        assert (spec["securityContext"]["runAsUser"] == 0) is as_root, where
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, where
        is_router = where == "Deployment/demo-millrace-router"
        assert spec["automountServiceAccountToken"] is is_router, where
        for container in own(spec):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True, where
            assert ("runAsUser" in context) is (container["name"].endswith("-owner")), where
            if name == "privileged" and container["name"] in ("worker", "preflight") and "router" not in where:
                assert context["privileged"] is True
            else:
                assert context["allowPrivilegeEscalation"] is False, where
                assert context["capabilities"]["drop"] == ["ALL"], where


@pytest.mark.parametrize("name", EVERYTHING)
def test_pod_mounts_what_is_there(name: str) -> None:
    """Volumes exist, mounts do not nest in read-only ones, and ConfigMaps and accounts are of this release
    or given by name."""
    items = rendered(name)
    maps = {item["metadata"]["name"] for item in of_kind(items, "ConfigMap")}
    accounts = {item["metadata"]["name"] for item in of_kind(items, "ServiceAccount")}
    for where, spec in pods(items):
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for container in own(spec):
            paths = sorted(mount["mountPath"] for mount in container["volumeMounts"])
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys(), where
            assert not any(b.startswith(a + "/") for a in paths for b in paths), where
        mounted = [volume["configMap"] for volume in volumes.values() if "configMap" in volume]
        assert {entry["name"] for entry in mounted if not entry.get("optional")} <= {"company", *maps}, where
        assert spec.get("serviceAccountName") in {None, "workload-identity", *accounts}, where


def own(spec: Object) -> list[Object]:
    """The chart's containers of a pod: the users' are theirs."""
    return [it for it in (*spec.get("initContainers", ()), *spec["containers"]) if it["name"] not in ("side", "first")]


@pytest.mark.parametrize("name", EVERYTHING)
def test_names_are_unique_and_selectors_do_not_overlap(name: str) -> None:
    items = rendered(name)
    names = [(item["kind"], item["metadata"]["name"]) for item in items]
    assert len(names) == len(set(names))
    selectors = [
        json.dumps(item["spec"]["selector"]["matchLabels"], sort_keys=True)
        for item in of_kind(items, "Deployment", "StatefulSet")
    ]
    assert len(selectors) == len(set(selectors))


def test_changed_configuration_rolls_its_pods_and_no_others() -> None:
    def templates(items: list[Object]) -> dict[str, Object]:
        return {item["metadata"]["name"]: item["spec"]["template"] for item in of_kind(items, "Deployment")}

    changed = ("workers.decode.config.timeouts.lease=31",)
    before, after = (templates(rendered("cpu-tiny", GIVEN, *more)) for more in ((), changed))
    assert {name for name in before if before[name] != after[name]} == {"demo-millrace-decode"}
