"""k8s/: what is referred to is pinned, what is there fits the chart."""

import json
import re
import shlex
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from millrace_chart.images import ROUTER, WORKERS
from millrace_chart.render import CHART, ROOT, objects, template
from millrace_common import metrics
from millrace_testing.charts import CPU, of_kind, pods

K8S = ROOT / "k8s"
KUSTOMIZATIONS = sorted(K8S.glob("prerequisites/*/kustomization.yaml"))


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda path: path.parent.name)
def test_references_are_pinned_and_files_are_there(path: Path) -> None:
    content = read(path)
    for chart in content.get("helmCharts", ()):
        assert re.fullmatch(r"v?\d+\.\d+\.\d+", chart["version"]), chart["name"]
        assert chart["name"] == "prometheus-adapter" or chart["includeCRDs"], "kustomize leaves out the folder crds"
        assert "prometheus" in chart["name"] or chart["skipHooks"], "kubectl runs those of the end of a release at once"
    for resource in content.get("resources", ()):
        remote = resource.startswith("https://")
        assert re.search(r"\?ref=v\d+\.\d+\.\d+$", resource) if remote else (path.parent / resource).is_file(), resource
    assert all((path.parent / patch["path"]).is_file() for patch in content.get("patches", ()))


def test_every_prerequisite_is_in_the_guide() -> None:
    text = (K8S / "README.md").read_text()
    for path in KUSTOMIZATIONS:
        assert f"k8s/prerequisites/{path.parent.name} " in text


def test_device_plugin_gives_what_the_fabrics_ask_for() -> None:
    patch = read(K8S / "prerequisites" / "rdma" / "devices.yaml")
    lists = json.loads(patch["data"]["config.json"])["configList"]
    given = {f"{entry['resourcePrefix']}/{entry['resourceName']}" for entry in lists}
    fabrics = read(CHART / "files" / "fabrics.yaml")
    assert given == {name for fabric in ("ib", "roce", "aks-ib") for name in fabrics[fabric]["resources"]}
    assert min(entry["rdmaHcaMax"] for entry in lists) >= 8


@pytest.mark.helm
def test_adapter_has_the_metrics_that_autoscalers_ask_for() -> None:
    charts = read(K8S / "prerequisites" / "monitoring" / "kustomization.yaml")["helmCharts"]
    (adapter,) = (chart for chart in charts if chart["name"] == "prometheus-adapter")
    names = {row.name for row in metrics.WORKER}
    given = set()
    for rule in adapter["valuesInline"]["rules"]["custom"]:
        series = rule["seriesQuery"].partition("{")[0]
        assert series in names
        given.add(rule.get("name", {}).get("as", series))
    sets = ("workerDefaults.autoscaling.kind=hpa", "workerDefaults.replicas=null")
    asked = {
        item["spec"]["metrics"][0]["pods"]["metric"]["name"]
        for item in of_kind(objects(template((CPU,), sets)), "HorizontalPodAutoscaler")
    }
    assert asked == given


@pytest.mark.helm
def test_demo_renders_and_its_ports_come_out() -> None:
    items = objects(template((K8S / "kind" / "values.yaml",), ("images.registry=",)))
    (host,) = (item for item in of_kind(items, "Service") if item["metadata"]["name"] == "millrace-host")
    kubernetes_validate.validate(host, "1.37", strict=True)
    (router,) = (it for it in of_kind(items, "Deployment") if it["metadata"]["name"].endswith("-router"))
    labels = router["spec"]["template"]["metadata"]["labels"]
    assert host["spec"]["selector"].items() <= labels.items()
    mapped = {entry["containerPort"] for entry in read(K8S / "kind" / "cluster.yaml")["nodes"][0]["extraPortMappings"]}
    assert {port["nodePort"] for port in host["spec"]["ports"]} == mapped
    guide = (K8S / "README.md").read_text()
    assert {container["image"] for _, spec in pods(items) for container in spec["containers"]} == {
        image.reference for image in (ROUTER, WORKERS["cpu"])
    }
    for image in (ROUTER, WORKERS["cpu"]):
        assert shlex.join(image.build("docker", "")) in guide
        assert image.reference in guide.partition("kind load docker-image")[2]
