"""The checks that test_render.py relies on can fail, and an upgrade changes nothing that an API server keeps."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from millrace_chart.render import CHART, EDITED, KUBERNETES, NAMESPACE, RELEASE, Object, objects, presets, run
from millrace_testing import kube_rules, kube_schema
from millrace_testing.charts import VARIANTS, of_kind, rendered
from millrace_testing.kube_names import amount
from millrace_testing.kube_upgrade import refused

GATEWAY = "gateway.networking.k8s.io/v1"
PORT = {"name": "metrics", "containerPort": 9}
CONTAINER = {"name": "c", "image": "i", "ports": [PORT], "env": [{"name": "A", "value": "1"}]}
POD: Object = {"containers": [CONTAINER], "volumes": [{"name": "v", "emptyDir": {}}]}
TEMPLATE = {"metadata": {"labels": {"app": "a"}}, "spec": POD}


def made(version: str, kind: str, spec: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": "it"}, "spec": copy.deepcopy(spec)}


GOOD: dict[str, Object] = {
    "Deployment": made("apps/v1", "Deployment", {"selector": {"matchLabels": {"app": "a"}}, "template": TEMPLATE}),
    "Service": made("v1", "Service", {"ports": [{"port": 1}, {"port": 1, "protocol": "UDP"}]}),
    "LeaderWorkerSet": made(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        {
            "leaderWorkerTemplate": {"size": 2, "leaderTemplate": TEMPLATE, "workerTemplate": TEMPLATE},
            "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": {"maxSurge": "10%"}},
        },
    ),
    "ScaledObject": made(
        "keda.sh/v1alpha1",
        "ScaledObject",
        {
            "scaleTargetRef": {"name": "a"},
            "triggers": [{"type": "prometheus", "metadata": {"threshold": "1"}}],
            "minReplicaCount": 1,
            "maxReplicaCount": 2,
            "fallback": {"failureThreshold": 1, "replicas": 1, "behavior": "currentReplicas"},
        },
    ),
    "HTTPRoute": made(
        GATEWAY,
        "HTTPRoute",
        {
            "parentRefs": [{"name": "a", "namespace": "x"}, {"name": "a", "namespace": "y"}],
            "rules": [
                {
                    "matches": [{"path": {"value": "/v1"}, "headers": [{"name": "a", "value": "b"}]}],
                    "timeouts": {"request": "10s", "backendRequest": "9s"},
                    "backendRefs": [{"name": "a", "port": 80}],
                }
            ],
        },
    ),
    "GRPCRoute": made(
        GATEWAY, "GRPCRoute", {"rules": [{"matches": [{"method": {"service": "a.B"}}], "backendRefs": []}]}
    ),
    "BackendTLSPolicy": made(
        GATEWAY,
        "BackendTLSPolicy",
        {
            "targetRefs": [{"group": "", "kind": "Service", "name": "a"}],
            "validation": {"hostname": "a.b", "wellKnownCACertificates": "System"},
        },
    ),
    "InferencePool": made(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        {
            "selector": {"matchLabels": {"a": "b"}},
            "targetPorts": [{"number": 1}, {"number": 2}],
            "endpointPickerRef": {"name": "a", "port": {"number": 9}},
        },
    ),
    "PrometheusRule": made(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        {"groups": [{"name": "a", "rules": [{"expr": "up", "for": "5m"}]}]},
    ),
    "Certificate": made(
        "cert-manager.io/v1",
        "Certificate",
        {"secretName": "a", "issuerRef": {"name": "b"}, "dnsNames": ["c"], "duration": "24h"},
    ),
    "Issuer": made("cert-manager.io/v1", "Issuer", {"selfSigned": {}}),
}
DELETED = object()
LWS = "spec.leaderWorkerTemplate"
RULE = "spec.rules.0"
C = "spec.template.spec.containers.0"
# kind, path, value, a part of what is said
BROKEN: list[tuple[str, str, Any, str]] = [
    # unknown fields, types, enums, limits
    ("Deployment", "spec.template.spec.hostnetwork", True, "hostnetwork"),
    ("LeaderWorkerSet", f"{LWS}.workerTemplate.spec.containerz", [], "containerz"),
    ("LeaderWorkerSet", f"{LWS}.restartPolicy", "Sometimes", "is not one of"),
    ("LeaderWorkerSet", f"{LWS}.size", 2**31, "maximum"),
    ("LeaderWorkerSet", "spec.rolloutStrategy.rollingUpdateConfiguration.maxSurge", 1.5, "is not of type"),
    ("LeaderWorkerSet", f"{LWS}.workerTemplate", DELETED, "is a required property"),
    ("ScaledObject", "spec.fallback.behavior", "guess", "is not one of"),
    ("ScaledObject", "spec.triggers.0.metadata.ignoreNullValues", False, "is not of type 'string'"),
    ("ScaledObject", "spec.triggers", [], "non-empty"),
    ("PrometheusRule", "spec.groups.0.rules.0.for", "5 minutes", "does not match"),
    ("Certificate", "spec.issuerRef.nam", "x", "'nam' was unexpected"),
    # what webhooks of custom resources refuse
    ("Issuer", "spec.ca", {"secretName": "a"}, "of one kind"),
    ("LeaderWorkerSet", f"{LWS}.size", 0, "one pod or more"),
    ("Certificate", "spec.dnsNames", DELETED, "commonName"),
    ("Certificate", "spec.commonName", "a" * 65, "64 characters"),
    # CEL
    ("ScaledObject", "spec.minReplicaCount", 3, "minReplicaCount"),
    ("LeaderWorkerSet", "spec.rolloutStrategy.rollingUpdateConfiguration", {"maxUnavailable": 0}, "both 0"),
    ("HTTPRoute", "spec.parentRefs.1.namespace", "x", "spec.parentRefs"),
    ("HTTPRoute", f"{RULE}.matches.0.path.value", "v1", "spec.rules[0].matches[0].path"),
    ("HTTPRoute", f"{RULE}.matches.0.path.value", "/a//b", "spec.rules[0].matches[0].path"),
    ("HTTPRoute", f"{RULE}.timeouts.backendRequest", "11s", "backendRequest"),
    ("HTTPRoute", f"{RULE}.backendRefs.0.port", DELETED, "port"),
    ("GRPCRoute", f"{RULE}.matches.0.method", {"type": "Exact"}, "spec.rules[0].matches[0].method"),
    ("BackendTLSPolicy", "spec.validation.wellKnownCACertificates", DELETED, "spec.validation"),
    ("InferencePool", "spec.endpointPickerRef.port", DELETED, "port"),
    ("InferencePool", "spec.targetPorts.1.number", 1, "spec.targetPorts"),
    # lists with keys
    ("Deployment", f"{C}.env", [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}], "the key name=A"),
    (
        "Deployment",
        f"{C}.ports",
        [PORT, {"containerPort": 9, "protocol": "TCP"}],
        "the key containerPort=9, protocol=",
    ),
    ("Deployment", f"{C}.volumeMounts", [{"name": n, "mountPath": "/a"} for n in "vw"], "the key mountPath=/a"),
    ("Deployment", "spec.template.spec.volumes", [{"name": "v", "emptyDir": {}}] * 2, "the key name=v"),
    ("LeaderWorkerSet", f"{LWS}.leaderTemplate.spec.volumes", [{"name": "v"}] * 2, "the key name=v"),
    ("Service", "spec.ports.1.protocol", DELETED, "the key port=1, protocol=TCP"),
    ("HTTPRoute", f"{RULE}.matches.0.headers", [{"name": "a", "value": v} for v in "bc"], "the key name=a"),
    ("PrometheusRule", "spec.groups", [{"name": "a"}, {"name": "a"}], "the key name=a"),
    # what is checked in code
    ("Service", "metadata.name", "9a", "no name of a Service"),
    ("LeaderWorkerSet", "metadata.name", "a" * 50, "no name of a LeaderWorkerSet"),
    ("Issuer", "metadata.labels", {"a": "b c"}, "no value of a label"),
    ("Issuer", "metadata.annotations", {"a/b/c": ""}, "is no key"),
    ("Issuer", "metadata.annotations", {"a": "b" * 2**18}, "bytes"),
    ("Deployment", "spec.template.spec.nodeSelector", {"a": "b" * 64}, "no value of a label"),
    ("Deployment", "spec.template.metadata.labels.app", "b", "not in the labels of the template"),
    ("Deployment", f"{C}.ports.0.name", "prometheus-metrics", "no name of a port"),
    ("Deployment", f"{C}.name", "C", "no name of a container"),
    ("Deployment", f"{C}.env.0.name", "1A", "no name of a variable"),
    ("Deployment", f"{C}.resources", {"limits": {"cpu": "1 core"}}, "no quantity"),
    (
        "Deployment",
        f"{C}.resources",
        {"limits": {"memory": "1Gi"}, "requests": {"memory": "2G"}},
        "with a limit of 1Gi",
    ),
    ("Deployment", f"{C}.resources", {"limits": {"a/b": 2}, "requests": {"a/b": 1}}, "with a limit of 2"),
    ("Deployment", f"{C}.resources", {"requests": {"a/b": 1}}, "no limit"),
    ("Deployment", "spec.template.spec.volumes.0.emptyDir", {"sizeLimit": "1 GiB"}, "no quantity"),
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


@pytest.mark.parametrize("kind", GOOD)
def test_good_objects_are_taken(kind: str) -> None:
    assert kube_schema.check(GOOD[kind]) == []


@pytest.mark.parametrize(("kind", "path", "value", "said"), BROKEN)
def test_broken_objects_are_refused(kind: str, path: str, value: Any, said: str) -> None:
    found = kube_schema.check(changed(GOOD[kind], path, value))
    assert any(said in problem for problem in found), found


def test_an_unknown_kind_is_not_passed_over() -> None:
    with pytest.raises(kube_schema.UnknownKind, match=r"Widget of a\.b/v1"):
        kube_schema.check(made("a.b/v1", "Widget", {}))


def test_every_rule_of_the_crds_can_be_compiled() -> None:
    found = {rule for schema in kube_schema.schemas().values() for rule in kube_rules.rules(schema)}
    found |= {each["rule"] for webhook in kube_rules.WEBHOOKS.values() for each in webhook}
    assert len(found) >= 14
    for rule in found:
        kube_rules.program(rule)


@pytest.mark.parametrize("rule", [{"rule": "nobody.knows(self)"}, {"rule": "oldSelf == 1", "optionalOldSelf": True}])
def test_a_rule_that_cannot_be_evaluated_is_a_problem(rule: Any) -> None:
    (problem,) = kube_rules.problems({"type": "object", "x-kubernetes-validations": [rule]}, {}, None, {})
    assert "cannot be evaluated" in problem


def test_a_rule_of_an_update_sees_the_old_value() -> None:
    old = GOOD["LeaderWorkerSet"]
    new = changed(old, f"{LWS}.subGroupPolicy", {"subGroupSize": 1})
    assert kube_schema.check(new) == []
    assert any("subGroupPolicy" in problem for problem in kube_schema.check(new, old))


def test_quantities() -> None:
    assert [amount(text) for text in ("1", "1500m", "1Ki", "1k", "1e3", ".5")] == [1, 1.5, 1024, 1000, 1000, 0.5]
    assert [amount(text) for text in ("", "1 Gi", "1gi", "Gi")] == [None] * 4


STATEFUL = made(
    "apps/v1", "StatefulSet", {"selector": {"matchLabels": {"app": "a"}}, "serviceName": "a", "template": TEMPLATE}
)
JOB = made("batch/v1", "Job", {"template": {"spec": {**POD, "restartPolicy": "Never"}}})
ROLES: Object = {
    **{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "a"}},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "a"},
}


@pytest.mark.parametrize(
    ("item", "path", "value", "said"),
    [
        (GOOD["Deployment"], "spec.selector.matchLabels", {}, "spec.selector"),
        (STATEFUL, "spec.serviceName", "b", "spec.serviceName"),
        (STATEFUL, "spec.volumeClaimTemplates", [], "spec.volumeClaimTemplates"),
        (JOB, "spec.template.metadata", {"labels": {"a": "b"}}, "spec.template"),
        (GOOD["Service"], "spec.clusterIP", "None", "spec.clusterIP"),
        (ROLES, "roleRef.name", "b", "roleRef"),
    ],
)
def test_an_upgrade_cannot_change_what_is_fixed(item: Object, path: str, value: Any, said: str) -> None:
    (problem,) = refused([item], [changed(item, path, value)])
    assert problem.endswith(f"{said} is immutable")
    assert not list(refused([item], [item]))
    hook = changed(item, "metadata.annotations", {"helm.sh/hook": "test"})
    assert not list(refused([item], [changed(hook, path, value)]))


@pytest.fixture(scope="module")
def next_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart as its next version, which has images of another tag."""
    chart = tmp_path_factory.mktemp("next") / "millrace"
    shutil.copytree(CHART, chart)
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "99.0.0", "appVersion": "99.0.0"}))
    return chart


@pytest.mark.helm
@pytest.mark.parametrize("name", ["hf", "s3", "oci", "keys", "hpa", "host", "keda-groups"])
def test_an_upgrade_to_the_next_chart_is_taken(name: str, next_chart: Path) -> None:
    """The next version of the chart, one more label and another setting of the workers."""
    file, sets = VARIANTS[name]
    arguments = ["template", RELEASE, str(next_chart), "--namespace", NAMESPACE, "--kube-version", KUBERNETES]
    for item in (EDITED, *sets, "labels.team=b", "workerDefaults.config.timeouts.lease=31"):
        arguments += ["--set", item]
    after = objects(run([*arguments, "--values", str(file)]))
    assert of_kind(after, "Deployment", "StatefulSet")
    assert not list(refused(rendered(name), after))


def test_published_crds_that_lack_a_kind_and_know_more_are_taken(tmp_path: Path) -> None:
    """$MILLRACE_CRDS, as k8s/README.md names it: a cluster without InferencePool, and with a newer LeaderWorkerSet."""
    items = [crd for crd in kube_schema.crds(kube_schema.OURS) if crd["spec"]["names"]["kind"] != "InferencePool"]
    (group,) = (crd for crd in items if crd["spec"]["names"]["kind"] == "LeaderWorkerSet")
    template = group["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    policy = template["leaderWorkerTemplate"]["properties"]["restartPolicy"]
    policy["enum"].append("RecreateGroupAfterStart")
    (tmp_path / "all.yaml").write_text(yaml.safe_dump({"items": items}))
    command = [sys.executable, "-m", "pytest", "-rs", "-m", "not helm", "-k", "not published_crds", __file__]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        env={**os.environ, "MILLRACE_CRDS": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("SKIPPED") == 1 and "the folder has no InferencePool" in done.stdout


@pytest.mark.skipif(not os.environ.get("MILLRACE_CRDS"), reason="$MILLRACE_CRDS names no folder of published CRDs")
@pytest.mark.parametrize("kind", [kind for kind in GOOD if kind not in {"Deployment", "Service"}])
def test_our_crds_say_no_more_than_the_published_ones(kind: str) -> None:
    """Each field of ours is there, with the same type, keys, default and no enum that is larger."""
    version = GOOD[kind]["apiVersion"]
    ours = dict(kube_schema.custom(kube_schema.OURS))[version, kind]
    published = dict(kube_schema.custom(kube_schema.folder())).get((version, kind))
    if published is None:
        pytest.skip(f"the folder has no {kind} of {version}")
    assert not list(differences(ours["properties"]["spec"], published["properties"]["spec"], "spec"))


def differences(ours: Any, theirs: Any, path: str) -> list[str]:
    if "$ref" in ours:
        return []
    found = [
        f"{path}: {key} {ours.get(key)!r}, published {theirs.get(key)!r}"
        for key in ("type", "default", "x-kubernetes-int-or-string", "x-kubernetes-list-map-keys")
        if ours.get(key) != theirs.get(key)
    ]
    if theirs.get("enum") and not set(ours.get("enum", [None])) <= set(theirs["enum"]):
        found.append(f"{path}: enum {ours.get('enum')}, published {theirs['enum']}")
    if not set(theirs.get("required", ())) <= set(ours.get("required", ())):
        found.append(f"{path}: required {ours.get('required')}, published {theirs['required']}")
    for name, child in ours.get("properties", {}).items():
        known = theirs.get("properties", {}).get(name)
        found += differences(child, known, f"{path}.{name}") if known else [f"{path}.{name}: not published"]
    if "items" in ours:
        found += differences(ours["items"], theirs["items"], f"{path}[]")
    return found


@pytest.mark.helm
def test_every_custom_resource_of_the_chart_has_a_schema() -> None:
    known = {kind for _, kind in kube_schema.schemas()}
    used = {item["kind"] for name in [*presets(), *VARIANTS] for item in rendered(name)}
    assert {
        "LeaderWorkerSet",
        "ScaledObject",
        "HTTPRoute",
        "InferencePool",
        "Certificate",
        "PodMonitor",
    } <= used & known
