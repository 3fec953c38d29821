"""What the chart makes of files/alerts.yaml for a release, and the labels that rules and autoscalers rely on."""

import subprocess
from pathlib import Path

import pytest
import yaml
from millrace_chart.render import (
    CHART,
    EDITED,
    KUBERNETES,
    NAMESPACE,
    OPERATOR,
    RELEASE,
    Object,
    objects,
    run,
    template,
)
from millrace_dashboards import alerts
from millrace_dashboards.promql import TARGET_LABELS
from millrace_testing import kube_schema
from millrace_testing.charts import CPU, NO_DASHBOARDS, PAIR, of_kind
from millrace_testing.prometheus import binary, needs_prometheus

pytestmark = pytest.mark.helm
ON = (NO_DASHBOARDS, "monitoring.enabled=true")
ALERTS = {name: {alert.title for alert in group} for name, group in alerts.groups().items()}
PLAIN = {title for name, titles in ALERTS.items() for title in titles if name != alerts.GPUS}


def monitors(*sets: str, preset: Path = CPU) -> list[Object]:
    return objects(template((preset,), (*ON, *sets)))


def rules(*sets: str, preset: Path = CPU) -> dict[str, Object]:
    """Rules by name."""
    (item,) = of_kind(monitors(*sets, preset=preset), "PrometheusRule")
    listed = [rule for group in item["spec"]["groups"] for rule in group["rules"]]
    return {rule.get("alert") or rule["record"]: rule for rule in listed}


@needs_prometheus
def test_rules_of_a_release_are_read_by_prometheus(tmp_path: Path) -> None:
    """With a model's name that has signs of three languages in it."""
    more = ("monitoring.dcgm=true", "monitoring.vllmNames=true", 'model.name=a"b\\\\c: {{ d }}')
    (item,) = of_kind(monitors(*more), "PrometheusRule")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(item["spec"]))
    command = [binary("promtool"), "check", "rules", "--lint-fatal", tmp_path / "rules.yaml"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    expr = rules(*more)["MillraceRoutersGone"]["expr"]
    assert f'namespace="{NAMESPACE}",model="a\\"b\\\\c: {{{{ d }}}}",release="{RELEASE}"' in expr


def test_api_server_takes_them() -> None:
    kinds = ("PrometheusRule", "PodMonitor", "ServiceMonitor")
    found = of_kind(monitors("monitoring.dcgm=true", "monitoring.vllmNames=true"), *kinds)
    assert len(found) == len(kinds)
    assert [problem for item in found for problem in kube_schema.check(item)] == []


def test_they_are_of_this_release() -> None:
    for rule in rules("model.name=m").values():
        assert "__" not in rule["expr"]
        assert f'namespace="{NAMESPACE}",model="m",release="{RELEASE}"' in rule["expr"]


def test_which_are_left_out() -> None:
    recorded = set(alerts.recordings()["millrace-scaling"])
    on_cpu, on_gpus = rules().keys(), rules(preset=PAIR).keys()
    assert on_gpus == PLAIN | recorded
    assert on_gpus - on_cpu == {"MillraceKvSlow"}
    assert "MillraceKvSlow" not in rules("fabric.preset=aws-efa", "images.gpuWorker.repository=efa", preset=PAIR)
    assert "MillraceKvSlow" not in rules("fabric.preset=tcp-dev", "fabric.allowTcp=true", preset=PAIR)
    fewer = rules("monitoring.disabledAlerts={MillraceErrors,MillraceGcPauses}").keys()
    assert on_cpu - fewer == {"MillraceErrors", "MillraceGcPauses"}
    assert rules("monitoring.dcgm=true").keys() - on_cpu == ALERTS[alerts.GPUS]
    assert rules("monitoring.vllmNames=true").keys() - on_cpu == alerts.recordings()[alerts.VLLM].keys()


def test_pages_and_panels_are_where_they_are_said_to_be() -> None:
    assert rules()["MillraceErrors"]["annotations"].keys() == {"summary"}
    at = "https://example.org"
    found = rules(f"monitoring.runbooks={at}/pages/", f"monitoring.grafana={at}/g/")["MillraceErrors"]["annotations"]
    assert found["runbook_url"] == f"{at}/pages/MillraceErrors.md"
    assert found["dashboard_url"].startswith(f"{at}/g/d/millrace-alerts?viewPanel=")


def test_worker_has_as_long_as_its_pool_gives_it() -> None:
    slow = rules("workers.prefill.startup=1200", "workers.decode.startup=7200")["MillraceWorkerNotReady"]
    assert slow["for"] == "7200s"


def test_targets_have_the_labels_that_queries_name() -> None:
    items = monitors("workers.prefill.podLabels.a=b")
    for item in of_kind(items, "PodMonitor", "ServiceMonitor"):
        endpoints = item["spec"].get("podMetricsEndpoints") or item["spec"]["endpoints"]
        relabelings = {row["targetLabel"]: row for endpoint in endpoints for row in endpoint["relabelings"]}
        given = {"namespace", "pod"}  # by the operator
        assert set(TARGET_LABELS) <= relabelings.keys() | given
        assert relabelings["release"]["replacement"] == RELEASE
        component = relabelings["component"]
        assert component.get("replacement") == ("router" if item["kind"] == "ServiceMonitor" else None)
        if item["kind"] == "PodMonitor":
            assert relabelings["pool"]["sourceLabels"] == ["__meta_kubernetes_pod_label_millrace_pool"]
    for item in of_kind(items, "Deployment"):
        labels = item["spec"]["template"]["metadata"]["labels"]
        name = item["metadata"]["name"]
        assert name.endswith("-router") or labels["millrace/pool"] == name.removeprefix(f"{RELEASE}-millrace-")


def test_install_does_not_fail_where_there_is_no_operator() -> None:
    """The API server refuses kinds that it does not know, and with them the whole release."""
    arguments = ["template", RELEASE, str(CHART), "--kube-version", KUBERNETES, "--values", str(PAIR), "--set", EDITED]
    kinds = ("PrometheusRule", "PodMonitor", "ServiceMonitor")
    assert not of_kind(objects(run(arguments)), *kinds)
    known = objects(run([*arguments, "--api-versions", OPERATOR]))
    assert {item["kind"] for item in of_kind(known, *kinds)} == set(kinds)
    assert of_kind(objects(run([*arguments, "--set", "monitoring.enabled=true"])), *kinds), "said, and so it is tried"
