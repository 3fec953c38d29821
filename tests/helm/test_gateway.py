"""Routes from a Gateway to the routers: what the chart makes."""

import pytest
import yaml
from millrace_chart.render import Object
from millrace_dashboards.promql import CATALOGUE
from millrace_testing.charts import of_kind, rendered

pytestmark = pytest.mark.helm
TLS = ("tls.mode=certManager", "tls.publicSecret=web")
HTTP = ("gateway.httpRoute.enabled=true", "gateway.httpRoute.parentRefs[0].name=gateway")
GRPC = ("gateway.grpcRoute.enabled=true", "gateway.grpcRoute.parentRefs[0].name=gateway")
NAMES = ("gateway.httpRoute.hostnames={llm.example.org}", "gateway.grpcRoute.hostnames={grpc.example.org}")
POOL = ("gateway.inferencePool.enabled=true", "gateway.inferencePool.endpointPicker.name=picker")
POLICY = ("gateway.backendTLS.kind=policy", "gateway.backendTLS.hostname=llm.example.org")
ROUTER = "demo-millrace-router"


def only(items: list[Object], kind: str) -> Object:
    (item,) = of_kind(items, kind)
    return item["spec"]


def test_route_leads_to_a_port_of_the_service() -> None:
    items = rendered("cpu-tiny", *HTTP, *GRPC, *NAMES)
    (service,) = (item for item in of_kind(items, "Service") if item["metadata"]["name"] == ROUTER)
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    http, grpc = only(items, "HTTPRoute"), only(items, "GRPCRoute")
    (rule,) = http["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}], "not what operators call"
    assert rule["timeouts"] == {"request": "0s"}, "answers stream for as long as they take"
    assert http["rules"][0]["backendRefs"] == [{"name": ROUTER, "port": ports["http"]}]
    assert grpc["rules"][0]["backendRefs"] == [{"name": ROUTER, "port": ports["grpc"]}]
    assert grpc["rules"][0]["matches"] == [{"method": {"service": "millrace.v1.Inference"}}]
    assert (http["hostnames"], grpc["hostnames"]) == (["llm.example.org"], ["grpc.example.org"])
    assert not of_kind(items, "BackendTLSPolicy", "InferencePool")


def test_two_routes_of_two_listeners_may_share_a_hostname() -> None:
    at = ("gateway.httpRoute.parentRefs[0].sectionName=http", "gateway.grpcRoute.parentRefs[0].sectionName=grpc")
    assert len(of_kind(rendered("cpu-tiny", *HTTP, *GRPC, *at), "HTTPRoute", "GRPCRoute")) == 2


@pytest.mark.parametrize(
    ("more", "trust"),
    [
        ((), {"wellKnownCACertificates": "System"}),
        (
            ("gateway.backendTLS.caConfigMap=ca",),
            {"caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": "ca"}]},
        ),
    ],
)
def test_policy_lets_the_gateway_speak_tls(more: tuple[str, ...], trust: Object) -> None:
    policy = only(rendered("cpu-tiny", *HTTP, *TLS, *POLICY, *more), "BackendTLSPolicy")
    assert policy["targetRefs"] == [{"group": "", "kind": "Service", "name": ROUTER}]
    assert policy["validation"] == {"hostname": "llm.example.org", **trust}


def test_endpoint_picker_reads_metrics_that_routers_have() -> None:
    """Each of them one series without labels: the picker takes one and does not add them up."""
    items = rendered("cpu-tiny", *HTTP, *POOL, "gateway.inferencePool.endpointPicker.failureMode=FailClose")
    pool = only(items, "InferencePool")
    (config,) = (item for item in of_kind(items, "ConfigMap") if item["metadata"]["name"].endswith("-endpoint-picker"))
    picker = yaml.safe_load(config["data"]["config.yaml"])
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in picker["plugins"]}
    extractor = plugins["core-metrics-extractor"]
    (engine,) = extractor["engineConfigs"]
    assert extractor["defaultEngine"] == engine["name"]
    metrics = {row.name: row for row in CATALOGUE.values()}
    for spec in ("queuedRequestsSpec", "runningRequestsSpec"):
        assert metrics[engine[spec]].labels == ()
    used = {entry["pluginRef"] for profile in picker["schedulingProfiles"] for entry in profile["plugins"]}
    used |= {source["pluginRef"] for source in picker["dataLayer"]["sources"]}
    assert used <= plugins.keys()
    assert only(items, "HTTPRoute")["rules"][0]["backendRefs"][0]["kind"] == "InferencePool"
    picker_ref = {"name": "picker", "port": {"number": 9002}, "failureMode": "FailClose"}
    assert pool["endpointPickerRef"] == picker_ref
