"""Autoscalers: what they count, how fast they shrink, and one signal for two pools, whose ratio then stays."""

import pytest
from millrace_chart.render import NAMESPACE, RELEASE, Object, objects, template
from millrace_dashboards.promql import CATALOGUE
from millrace_testing import kube_schema
from millrace_testing.charts import CPU, HPA, KEDA, NO_DASHBOARDS, of_kind, rendered

pytestmark = pytest.mark.helm
QUERY = f'sum({CATALOGUE["active"].name}{{namespace="serving"}})'
GROUPS = ("workers.decode-node.role=decode",)  # a second decode pool, whose name begins with that of the first


def scalers(kind: tuple[str, ...], *sets: str) -> dict[str, Object]:
    """`spec` by the pool's name."""
    items = objects(template((CPU,), (NO_DASHBOARDS, *(f"workerDefaults.{item}" for item in kind), *sets)))
    found = of_kind(items, "ScaledObject", "HorizontalPodAutoscaler")
    assert [problem for item in found for problem in kube_schema.check(item)] == []
    return {item["metadata"]["labels"]["millrace/pool"]: item["spec"] for item in found}


def test_two_pools_follow_one_query() -> None:
    at = [f"workers.{pool}.autoscaling" for pool in ("prefill", "decode")]
    query = QUERY.replace("{", r"\{").replace("}", r"\}").replace(",", r"\,")
    items = rendered("keda", *(f"{key}.query={query}" for key in at), f"{at[0]}.target=64", f"{at[1]}.target=32")
    triggers = {
        item["spec"]["scaleTargetRef"]["name"]: item["spec"]["triggers"][0]["metadata"]
        for item in of_kind(items, "ScaledObject")
    }
    assert {trigger["query"] for trigger in triggers.values()} == {QUERY}
    thresholds = {name.rsplit("-", 1)[1]: float(trigger["threshold"]) for name, trigger in triggers.items()}
    assert thresholds == {"prefill": 64, "decode": 32}


def test_pool_counts_its_own_workers_only() -> None:
    for pool, spec in scalers(KEDA, *GROUPS).items():
        query = spec["triggers"][0]["metadata"]["query"]
        assert f'namespace="{NAMESPACE}",release="{RELEASE}",pool="{pool}"' in query
        assert "pod=~" not in query


def test_without_an_answer_of_prometheus_the_number_stays() -> None:
    for spec in scalers(KEDA).values():
        assert spec["triggers"][0]["metadata"]["ignoreNullValues"] == "false"
        assert "fallback" not in spec, "KEDA before 2.17 would scale to its `replicas`"


@pytest.mark.parametrize("kind", [HPA, KEDA])
@pytest.mark.parametrize(("timeout", "period"), [(90, 105), (3600, 1800)])
def test_one_at_a_time_as_long_as_the_api_allows(kind: tuple[str, ...], timeout: int, period: int) -> None:
    more = ("autoscaling.maxReplicas=6", "autoscaling.scaleDownSeconds=77", f"drain.timeout={timeout}")
    spec = scalers(kind, *(f"workers.decode.{item}" for item in more))["decode"]
    assert spec.get("maxReplicas", spec.get("maxReplicaCount")) == 6
    behavior = spec.get("behavior") or spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": period}]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 77


def test_targets() -> None:
    for kind, share in ((HPA, "800m"), (KEDA, "0.8")):
        found = {pool: _target(spec) for pool, spec in scalers(kind).items()}
        assert found == {"prefill": "8192", "decode": share}
        own = scalers(kind, "workers.decode.autoscaling.target=0.6", "workers.prefill.autoscaling.target=4096")
        assert {pool: _target(spec) for pool, spec in own.items()} == {"prefill": "4096", "decode": "0.6"}


def _target(spec: Object) -> str:
    if "triggers" in spec:
        return spec["triggers"][0]["metadata"]["threshold"]
    return spec["metrics"][0]["pods"]["target"]["averageValue"]
