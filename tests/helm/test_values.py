"""What values become: configurations that the processes accept, probes, autoscalers, policies, comments."""

import re

import pytest
import yaml
from millrace_chart.render import CHART, NAMESPACE
from millrace_router.config import RouterConfig
from millrace_serve.worker.config import WorkerConfig
from millrace_testing.charts import EVERYTHING, config_of, of_kind, pods, rendered, spec_of

ROUTER = "demo-millrace-router"


@pytest.mark.helm
@pytest.mark.parametrize("name", EVERYTHING)
def test_processes_accept_their_configuration(name: str) -> None:
    items = rendered(name)
    router = RouterConfig.model_validate(config_of(items, ROUTER))
    workers = [
        WorkerConfig.model_validate(yaml.safe_load(item["data"]["config.yaml"]))
        for item in of_kind(items, "ConfigMap")
        if item["metadata"]["labels"]["app.kubernetes.io/component"] in ("prefill", "decode", "unified")
    ]
    assert router.timeouts.drain == 900 and workers
    for worker in workers:
        assert str(worker.model) in (router.model, "/opt/b"), "the pool's own, or everybody's"
        assert (worker.tls is None) is (router.tls is None)
        assert worker.tls is None or worker.tls.server_name == f"demo-millrace-workers.{NAMESPACE}.svc"


@pytest.mark.helm
@pytest.mark.parametrize("name", EVERYTHING)
def test_ports_are_those_of_the_configuration(name: str) -> None:
    """Probes ask the plain health port, and discovery finds the port named grpc."""
    items = rendered(name)
    for where, spec in pods(items):
        main = spec["containers"][0]
        if not main.get("ports"):
            continue
        ports = {port["name"]: port["containerPort"] for port in main["ports"]}
        config = config_of(items, where.split("/")[1])
        health = config.get("health_port") or int(config["health"].rpartition(":")[2])
        grpc = config.get("grpc_port") or int(config["grpc"].rpartition(":")[2])
        assert (ports["health"], ports["grpc"]) == (health, grpc), where
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert main[probe]["grpc"]["port"] == health, where
        assert main["livenessProbe"]["grpc"]["service"] == "liveness", where


@pytest.mark.helm
@pytest.mark.parametrize("name", ["cpu-tiny", "groups"])
def test_service_port_leads_to_the_port_of_its_name(name: str) -> None:
    for item in of_kind(rendered(name), "Service"):
        for port in item["spec"]["ports"]:
            assert port["targetPort"] == port["name"], item["metadata"]["name"]


@pytest.mark.helm
def test_admin_port_is_on_loopback_unless_another_host_is_said() -> None:
    for sets, host in (((), "127.0.0.1"), (("router.adminHost=0.0.0.0", "tls.mode=certManager"), "0.0.0.0")):
        config = config_of(rendered("cpu-tiny", *sets), ROUTER)
        assert [config[key].rpartition(":")[0] for key in ("admin", "admin_http")] == [host] * 2


@pytest.mark.helm
@pytest.mark.parametrize("plain", ["true", "false"])
def test_api_keys_without_tls_are_taken_only_where_that_is_said(plain: str) -> None:
    config = config_of(rendered("keys", "tls.mode=certManager", f"apiKeys.allowPlaintext={plain}"), ROUTER)
    assert config["api_keys"] == "/etc/millrace/keys/keys.yaml" and config["api_keys_plaintext"] is (plain == "true")


@pytest.mark.helm
def test_drain_fits_into_the_grace() -> None:
    items = rendered("cpu-tiny", "workers.decode.drain.timeout=40", "workers.decode.drain.preStop=7")
    spec = spec_of(items)
    assert spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert config_of(items, "demo-millrace-decode")["timeouts"]["drain"] == 40
    assert spec["terminationGracePeriodSeconds"] >= 7 + 40 + 15


@pytest.mark.helm
def test_group_has_one_frontend_and_ray_on_pinned_ports() -> None:
    items = rendered("groups")
    found = dict(pods(items))
    leader, follower = (
        found[f"LeaderWorkerSet/demo-millrace-prefill/{part}"]["containers"][0]
        for part in ("leaderTemplate", "workerTemplate")
    )
    flags = next(entry["value"] for entry in leader["env"] if entry["name"] == "RAY_FLAGS")
    assert "--node-ip-address=$(POD_IP)" in flags and "--num-cpus=8 --num-gpus=8" in flags
    assert len(re.findall(r"--[a-z-]+-port=\d+", flags)) == 8
    assert leader["ports"] and leader["readinessProbe"] and "ports" not in follower and "readinessProbe" not in follower
    assert follower["lifecycle"]["preStop"]["exec"]["command"][-1] == "linger"
    config = config_of(items, "demo-millrace-prefill")
    assert (config["launcher"], config["dp"], config["tp"]) == ("ray", 32, 1)
    service = next(it for it in of_kind(items, "Service") if it["metadata"]["name"] == "demo-millrace-prefill-leaders")
    label, _, value = RouterConfig.model_fields["discovery"].default.kubernetes.leader.partition("=")
    assert service["spec"]["selector"][label] == value


@pytest.mark.helm
@pytest.mark.parametrize("name", ["hpa", "keda", "keda-groups"])
def test_autoscaler_begins_with_its_minimum(name: str) -> None:
    """A field that an upgrade leaves out falls back to 1, whatever runs; in a cluster the live number is rendered."""
    items = rendered(name)
    scalers = of_kind(items, "HorizontalPodAutoscaler", "ScaledObject")
    kinds = ("StatefulSet", "LeaderWorkerSet", "Deployment")
    targets = {(item["apiVersion"], item["kind"], item["metadata"]["name"]): item for item in of_kind(items, *kinds)}
    assert len(scalers) >= 2
    for scaler in scalers:
        target = scaler["spec"]["scaleTargetRef"]
        scaled = targets[target["apiVersion"], target["kind"], target["name"]]
        least = scaler["spec"].get("minReplicas", scaler["spec"].get("minReplicaCount"))
        assert scaled["spec"]["replicas"] == least
        assert "Resource" not in [it["type"] for it in scaler["spec"].get("metrics", ())], "sidecars have no request"


@pytest.mark.helm
def test_each_role_scales_on_what_it_runs_out_of() -> None:
    queries = {
        item["metadata"]["name"]: item["spec"]["triggers"][0]["metadata"]["query"]
        for item in of_kind(rendered("keda"), "ScaledObject")
    }
    assert "millrace_waiting_tokens{" in queries["demo-millrace-prefill"]
    assert "millrace_kv_pages{" in queries["demo-millrace-decode"]


@pytest.mark.helm
def test_every_pod_of_ours_has_an_egress_policy() -> None:
    for variant in ("egress", "hf"):
        made = rendered(variant, "networkPolicy.egress.enabled=true")
        policies = [it["spec"] for it in of_kind(made, "NetworkPolicy") if it["spec"]["policyTypes"] == ["Egress"]]
        ours = of_kind(made, "Deployment", "StatefulSet", "Job", "Pod")
        assert len(ours) >= 4
        for item in ours:
            labels = item["spec"].get("template", item)["metadata"]["labels"]
            selectors = (policy["podSelector"]["matchLabels"] for policy in policies)
            assert any(selector.items() <= labels.items() for selector in selectors), item["metadata"]["name"]


def test_routers_certificate_names_its_services_as_clients_call_them() -> None:
    made = rendered("tls")
    services = [it["metadata"]["name"] for it in of_kind(made, "Service") if "-router" in it["metadata"]["name"]]
    assert len(services) == 2, "for simple clients, and for those that balance themselves"
    (router,) = (it for it in of_kind(made, "Certificate") if it["metadata"]["name"].endswith("-router"))
    names = router["spec"]["dnsNames"]
    assert {f"{service}{rest}" for service in services for rest in ("", f".{NAMESPACE}", f".{NAMESPACE}.svc")} < {
        *names
    }
    assert "127.0.0.1" in router["spec"]["ipAddresses"], "admin ports are reached by port-forward and exec only"


def test_every_value_has_a_comment() -> None:
    """On its own line, or on the line of the section that it is in."""
    covered: list[tuple[int, bool]] = []
    bare = []
    comment_before = False
    for number, line in enumerate((CHART / "values.yaml").read_text().splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            comment_before = line.lstrip().startswith("#")
            continue
        indent = len(line) - len(line.lstrip())
        covered = [entry for entry in covered if entry[0] < indent]
        documented = comment_before or "#" in line or any(done for _, done in covered)
        is_section = line.rstrip().endswith(":") or "&" in line
        if not documented and not is_section and line.split(":")[0].strip() not in SELF_EXPLAINING:
            bare.append(f"{number}: {line.strip()}")
        covered.append((indent, comment_before or "#" in line))
        comment_before = False
    assert not bare


SELF_EXPLAINING = (
    "<<", "repository", "pullPolicy", "nodeSelector", "tolerations", "priorityClassName", "schedulerName",
    "runtimeClassName", "resources", "requests", "limits", "pdb", "podLabels", "podAnnotations", "minReplicas",
    "maxReplicas", "env", "ports", "claim", "gpuResource", "scheduling", "annotations", "interval", "httpRoute",
)  # fmt: skip
