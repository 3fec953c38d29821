"""docs/platforms and helm/millrace/platforms: a page and values for each platform, which render on every preset."""

import re
from functools import cache
from typing import Any

import pytest
import yaml
from millrace_chart import mirror
from millrace_chart.render import CHART, KUBERNETES, ROOT, Object, objects, preset_file, run
from millrace_testing import kube_schema
from millrace_testing.charts import NO_DASHBOARDS, of_kind, pods

pytestmark = pytest.mark.helm
FOLDER, PAGES = CHART / "platforms", ROOT / "docs" / "platforms"
PLATFORMS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
PAIR = "h200-1p1d-16gpu"
OF_GOOGLE = {"PodMonitoring"}  # kinds without a schema here


def values(platform: str) -> Any:
    return yaml.safe_load((FOLDER / f"{platform}.yaml").read_text())


@cache
def rendered(platform: str, preset: str = PAIR, which: str = "helm", *more: str) -> list[Object]:
    arguments = ["template", "millrace", str(CHART), "--kube-version", KUBERNETES, "--set", NO_DASHBOARDS]
    arguments += ["--values", str(preset_file(preset)), "--values", str(FOLDER / f"{platform}.yaml")]
    if not values(platform).get("images", {}).get("registry"):
        arguments += ["--set", "images.registry=ghcr.io/acme"]
    for item in more:
        arguments += ["--set", item]
    return objects(run(arguments, which))


def workers(items: list[Object]) -> list[Object]:
    return [spec for where, spec in pods(items) if where.startswith("Deployment/") and "router" not in where]


def containers(items: list[Object]) -> list[Object]:
    return [c for _, spec in pods(items) for c in (*spec.get("initContainers", ()), *spec["containers"])]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_values_of_a_platform_make_valid_objects(platform: str) -> None:
    unified = rendered(platform, "h200-8gpu-unified") if platform in ("openshift", "aks") else ()
    for item in (*rendered(platform), *unified):
        if item["kind"] not in OF_GOOGLE:
            assert kube_schema.check(item) == [], f"{item['kind']} {item['metadata']['name']}"


@pytest.mark.helm("oldest")
@pytest.mark.parametrize("platform", PLATFORMS)
def test_oldest_helm_renders_a_platform_alike(platform: str) -> None:
    old, new = (
        [(item["kind"], item["metadata"]["name"], item.get("spec")) for item in rendered(platform, PAIR, which)]
        for which in ("oldest", "helm")
    )
    assert old == new


def test_each_platform_has_a_page_that_installs_its_values() -> None:
    assert len(PLATFORMS) == 7
    assert {path.stem for path in PAGES.glob("*.md")} == {"README", *PLATFORMS}
    index = (PAGES / "README.md").read_text()
    for platform in PLATFORMS:
        page = (PAGES / f"{platform}.md").read_text()
        assert f"-f helm/millrace/platforms/{platform}.yaml" in page and "**What bites first**" in page
        assert f"[{platform}.md]({platform}.md)" in index and f"`helm/millrace/platforms/{platform}.yaml`" in index
        assert f"docs/platforms/{platform}.md" in (FOLDER / f"{platform}.yaml").read_text()


def test_pods_on_openshift_fit_the_strictest_constraints() -> None:
    """restricted-v2: no number, no capability, and volumes of these kinds."""
    allowed = {"configMap", "downwardAPI", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
    items = rendered("openshift")
    for where, spec in pods(items):
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & spec["securityContext"].keys(), where
        assert all(set(volume) - {"name"} <= allowed for volume in spec["volumes"]), where
    for container in containers(items):
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]} and context["allowPrivilegeEscalation"] is False
        assert "runAsUser" not in context


def test_unified_pool_on_aks_tolerates_the_taint_of_agent_pools() -> None:
    (worker,) = workers(rendered("aks", "h200-8gpu-unified", "helm", "fabric.preset="))
    assert {"key": "sku", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"} in worker["tolerations"]


def test_workers_on_bare_metal_are_guaranteed_and_read_their_own_disk() -> None:
    items = rendered("bare-metal")
    for spec in workers(items):
        for container in (*spec["initContainers"], *spec["containers"]):
            given = container["resources"]
            assert all(given["limits"][key] == given["requests"][key] for key in ("cpu", "memory"))
            assert float(given["limits"]["cpu"]).is_integer(), "whole cores"
        (model,) = (volume for volume in spec["volumes"] if volume["name"] == "model")
        assert model["hostPath"]["path"] == "/mnt/nvme/models"
    (router,) = (spec for where, spec in pods(items) if where == "Deployment/millrace-router")
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}} in router["volumes"]


def test_air_gapped_site_pulls_from_its_registry_alone() -> None:
    registry = values("air-gapped")["images"]["registry"]
    images = {container["image"] for container in containers(rendered("air-gapped"))}
    assert all(image.startswith(f"{registry}/") for image in images) and len(images) == 3
    pairs = mirror.copies((preset_file(PAIR), FOLDER / "air-gapped.yaml"), (), registry)
    assert {copy for _, copy in pairs} == images


def test_google_finds_the_pods_and_the_service() -> None:
    items = rendered("gke")
    (monitoring,) = of_kind(items, "PodMonitoring")
    wanted = monitoring["spec"]["selector"]["matchLabels"]
    deployments = of_kind(items, "Deployment")
    assert len(deployments) == 3
    for item in deployments:
        template = item["spec"]["template"]
        assert wanted.items() <= template["metadata"]["labels"].items()
        ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert {endpoint["port"] for endpoint in monitoring["spec"]["endpoints"]} <= ports
    blocks = re.findall(r"```yaml\n(.*?)```", (PAGES / "gke.md").read_text(), re.DOTALL)
    policies = [policy for block in blocks for policy in yaml.safe_load_all(block)]
    assert {policy["kind"] for policy in policies} == {"GCPBackendPolicy", "HealthCheckPolicy"}
    services = {item["metadata"]["name"] for item in of_kind(items, "Service")}
    assert {policy["spec"]["targetRef"]["name"] for policy in policies} <= services


@pytest.mark.parametrize("platform", ["eks", "aks", "gke", "coreweave", "bare-metal"])
def test_clients_outside_reach_the_router_by_one_service(platform: str) -> None:
    """And what an annotation says about a port is about one of its ports."""
    services = of_kind(rendered(platform), "Service")
    (service,) = (it for it in services if it["spec"].get("type") in ("LoadBalancer", "NodePort"))
    ports = {str(port["port"]) for port in service["spec"]["ports"]}
    named = {key.rpartition("TCP-")[2] for key in service["metadata"].get("annotations", {}) if "TCP-" in key}
    assert named in (set(), ports)
