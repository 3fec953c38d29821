"""The checks that other tests rely on can fail, and an upgrade changes nothing that an API server keeps."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from millrace_chart.render import CHART, EDITED, KUBERNETES, NAMESPACE, RELEASE, Object, objects, run
from millrace_testing import kube_schema
from millrace_testing.charts import EVERYTHING, VARIANTS, of_kind, rendered
from millrace_testing.kube_upgrade import refused

CONTAINER = {"name": "c", "image": "i", "ports": [{"name": "metrics", "containerPort": 9}]}
TEMPLATE = {
    "metadata": {"labels": {"app": "a"}},
    "spec": {"containers": [CONTAINER], "volumes": [{"name": "v", "emptyDir": {}}]},
}


def made(version: str, kind: str, spec: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": "it"}, "spec": copy.deepcopy(spec)}


WORKLOAD = {"selector": {"matchLabels": {"app": "a"}}, "template": TEMPLATE}
GROUP = {"leaderWorkerTemplate": {"size": 2, "leaderTemplate": TEMPLATE, "workerTemplate": TEMPLATE}}
ROUTE = {"parentRefs": [{"name": "a", "namespace": "x"}, {"name": "a", "namespace": "y"}], "rules": [{"matches": []}]}
GOOD: dict[str, Object] = {
    "Deployment": made("apps/v1", "Deployment", WORKLOAD),
    "StatefulSet": made("apps/v1", "StatefulSet", {**WORKLOAD, "serviceName": "a"}),
    "Service": made("v1", "Service", {"ports": [{"port": 1}, {"port": 1, "protocol": "UDP"}]}),
    "LeaderWorkerSet": made("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", GROUP),
    "HTTPRoute": made("gateway.networking.k8s.io/v1", "HTTPRoute", ROUTE),
    "Issuer": made("cert-manager.io/v1", "Issuer", {"selfSigned": {}}),
}
DELETED = object()
C = "spec.template.spec.containers.0"
LIMITED = {"limits": {"memory": "1Gi"}, "requests": {"memory": "2G"}}
BROKEN: list[tuple[str, str, Any, str]] = [  # kind, path, value, a part of what is said: a row for each kind of check
    ("Deployment", "spec.template.spec.hostnetwork", True, "hostnetwork"),
    ("LeaderWorkerSet", "spec.leaderWorkerTemplate.workerTemplate.spec.containerz", [], "containerz"),
    ("LeaderWorkerSet", "spec.leaderWorkerTemplate.restartPolicy", "Sometimes", "is not one of"),
    ("LeaderWorkerSet", "spec.leaderWorkerTemplate.size", 2**31, "maximum"),
    ("LeaderWorkerSet", "spec.leaderWorkerTemplate.size", 0, "one pod or more"),
    ("LeaderWorkerSet", "spec.leaderWorkerTemplate.workerTemplate", DELETED, "is a required property"),
    ("HTTPRoute", "spec.parentRefs.1.namespace", "x", "spec.parentRefs"),
    ("Deployment", "spec.template.spec.volumes", [{"name": "v", "emptyDir": {}}] * 2, "the key name=v"),
    ("Service", "spec.ports.1.protocol", DELETED, "the key port=1, protocol=TCP"),
    ("LeaderWorkerSet", "metadata.name", "a" * 50, "no name of a LeaderWorkerSet"),
    ("Issuer", "metadata.labels", {"a": "b c"}, "no value of a label"),
    ("Issuer", "metadata.annotations", {"a/b/c": ""}, "is no key"),
    ("Deployment", "spec.template.metadata.labels.app", "b", "not in the labels of the template"),
    ("Deployment", f"{C}.ports.0.name", "prometheus-metrics", "no name of a port"),
    ("Deployment", f"{C}.resources", {"limits": {"cpu": "1 core"}}, "no quantity"),
    ("Deployment", f"{C}.resources", LIMITED, "with a limit of 1Gi"),
    ("Deployment", f"{C}.resources", {"requests": {"a/b": 1}}, "no limit"),
]


def changed(item: Object, path: str, value: Any) -> Object:
    item = copy.deepcopy(item)
    *way, last = path.split(".")
    at: Any = item
    for name in way:
        at = at[int(name)] if isinstance(at, list) else at.setdefault(name, {})
    if value is DELETED:
        del at[last]
    else:
        at[int(last) if isinstance(at, list) else last] = value
    return item


@pytest.mark.parametrize(("kind", "path", "value", "said"), BROKEN)
def test_broken_object_is_refused(kind: str, path: str, value: Any, said: str) -> None:
    assert kube_schema.check(GOOD[kind]) == []
    found = kube_schema.check(changed(GOOD[kind], path, value))
    assert any(said in problem for problem in found), found


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", "spec.selector.matchLabels", {}),
        ("StatefulSet", "spec.serviceName", "b"),
        ("Service", "spec.clusterIP", "None"),
    ],
)
def test_upgrade_that_changes_a_fixed_field_is_refused(kind: str, path: str, value: Any) -> None:
    (problem, *_) = refused([GOOD[kind]], [changed(GOOD[kind], path, value)])
    assert problem.endswith("is immutable")
    assert not list(refused([GOOD[kind]], [GOOD[kind]]))


@pytest.fixture(scope="module")
def next_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart as its next version, which has images of another tag."""
    chart = tmp_path_factory.mktemp("next") / "millrace"
    shutil.copytree(CHART, chart)
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "99.0.0+next", "appVersion": "99.0.0"}))
    return chart


@pytest.mark.helm
@pytest.mark.parametrize("name", ["hf", "keys", "hpa", "host", "keda-groups"])
def test_upgrade_to_the_next_chart_is_taken(name: str, next_chart: Path) -> None:
    """The next version of the chart, one more label and another setting of the workers. Jobs have another name."""
    file, sets = VARIANTS[name]
    arguments = ["template", RELEASE, str(next_chart), "--namespace", NAMESPACE, "--kube-version", KUBERNETES]
    for item in (EDITED, *sets, "labels.team=b", "workerDefaults.config.timeouts.lease=31"):
        arguments += ["--set", item]
    after = objects(run([*arguments, "--values", str(file)]))
    found = of_kind(after, "Deployment", "StatefulSet")
    assert found and not [problem for item in found for problem in kube_schema.check(item)]
    assert not list(refused(rendered(name), after))


@pytest.mark.helm
def test_custom_resource_of_the_chart_has_a_schema() -> None:
    known = {kind for _, kind in kube_schema.schemas()}
    used = {item["kind"] for name in EVERYTHING for item in rendered(name)}
    custom = {"LeaderWorkerSet", "ScaledObject", "HTTPRoute", "InferencePool", "Certificate", "PodMonitor"}
    assert custom <= used & known
