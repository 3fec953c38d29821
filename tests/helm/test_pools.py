"""What a pool may have that presets do not: CPUs of its own, a checkpoint on nodes' disks, groups within a domain."""

import re

import pytest
from millrace_chart.render import CHART, EDITED, ChartError, Object, run
from millrace_testing.charts import GROUPS, config_of, of_kind, pods, rendered

pytestmark = pytest.mark.helm
NVME = ("workerDefaults.model.source=hostPath", "workerDefaults.model.hostPath=/mnt/nvme", "model.claim=tokenizer")


def quality(spec: Object) -> str:
    """The class that Kubernetes gives to a pod: of every container, initial ones too, CPU and memory count."""
    each = [it["resources"] for it in (*spec["initContainers"], *spec["containers"])]
    pairs = [(it["requests"].get(key), it.get("limits", {}).get(key)) for it in each for key in ("cpu", "memory")]
    return "Guaranteed" if all(asked and asked == most for asked, most in pairs) else "Burstable"


@pytest.mark.parametrize("name", ["h200-8gpu-unified", "own-rack"])
@pytest.mark.parametrize("tier", [(), ("workerDefaults.config.limits.host_cache_gib=3",)], ids=["", "host tier"])
def test_pods_of_a_guaranteed_pool_are_guaranteed(name: str, tier: tuple[str, ...]) -> None:
    for sets, expected in (((), "Burstable"), (("workerDefaults.guaranteed=true",), "Guaranteed")):
        items = of_kind(rendered(name, *sets, *tier), "Deployment", "LeaderWorkerSet")
        workers = [spec for where, spec in pods(items) if not where.endswith("-router")]
        assert workers and {quality(spec) for spec in workers} == {expected}
        assert {spec["containers"][0]["resources"]["requests"]["cpu"] for spec in workers} == {"32"}


def test_router_reads_a_claim_while_workers_read_disks_of_nodes() -> None:
    items = rendered("h200-1p1d-16gpu", *NVME)
    found = {
        where.rpartition("-")[2]: volume
        for where, spec in pods(of_kind(items, "Deployment"))
        for volume in spec["volumes"]
        if volume["name"] == "model"
    }
    assert found["router"]["persistentVolumeClaim"]["claimName"] == "tokenizer"
    for role in ("prefill", "decode"):
        assert found[role]["hostPath"] == {"path": "/mnt/nvme", "type": "Directory"}, "it waits for the folder"
        assert config_of(items, f"demo-millrace-{role}")["model"] == config_of(items, "demo-millrace-router")["model"]


@pytest.mark.parametrize("version", ["v1.30.14-eks-1", "v1.31.9-gke.1"])
@pytest.mark.parametrize("mode", ["preferred", "required", "exclusive"])
def test_groups_within_a_domain_need_a_kubernetes_that_tells_groups_apart(version: str, mode: str) -> None:
    """Before 1.31 the API server drops matchLabelKeys, and the second group waits for the domain of the first."""
    sets = f"{EDITED},workers.decode.topology.key=rack,workers.decode.topology.mode={mode}"
    command = ["template", "demo", str(CHART), "--kube-version", version, "--values", str(GROUPS), "--set", sets]
    if mode == "required" and re.match(r"v?1\.(29|30)\.", version):
        with pytest.raises(ChartError, match=r"workers\.decode\.topology\.mode: required needs Kubernetes 1\.31"):
            run(command)
    else:
        assert run(command)


def test_a_flexible_pool_needs_no_partner_and_is_known_to_routers_and_policies() -> None:
    items = rendered("cpu-tiny", "workers.prefill=null", "workers.decode.role=flexible")
    assert config_of(items, "demo-millrace-decode")["role"] == "flexible"
    [spec] = [spec for where, spec in pods(of_kind(items, "Deployment")) if where.endswith("-decode")]
    assert "millrace_serve.decode" in spec["containers"][0]["args"] + spec["containers"][0].get("command", [])
    assert "podAntiAffinity" not in spec.get("affinity", {})
    lists = [text for item in items for text in re.findall(r"prefill[', ]+decode[', ]+unified[', a-z]+", str(item))]
    assert len(lists) > 1 and all("flexible" in text for text in lists)
