"""Values that cannot work are refused while the chart renders, with a message that names them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from millrace_chart.render import CHART, ChartError, objects, template
from millrace_testing.charts import CPU, GROUPS, PAIR

pytestmark = pytest.mark.helm
HPA = ("autoscaling.kind=hpa", "autoscaling.minReplicas=3", "autoscaling.maxReplicas=2", "replicas=null")
LONG = "a-name-that-is-as-long-as-names-can-be-x"
COMBINATIONS = {
    "grace of a worker": (
        CPU,
        ("workers.decode.drain.timeout=91",),
        "workers.decode.terminationGracePeriodSeconds: 120",
    ),
    "grace of the router": (CPU, ("router.drain.preStop=16",), "router.terminationGracePeriodSeconds: 90 is too short"),
    "GPUs and ranks": (PAIR, ("workers.decode.dp=4",), "size 1 x gpus 8 = 8 GPUs, but dp 4 x tp 1 = 4 ranks"),
    "ranks and pods": (
        CPU,
        ("workers.decode.kind=lws", "workers.decode.size=2", "workers.decode.dp=3"),
        "cannot be spread evenly over size 2 pods",
    ),
    "experts": (
        GROUPS,
        ("workers.decode.size=9", "workers.decode.dp=72"),
        "model.routedExperts 256 cannot be divided by dp 72 x tp 1 = 72 ranks",
    ),
    "parts of experts": (
        PAIR,
        ("workers.decode.config.expert_tp=true",),
        "workers.decode.config.expert_tp: needs dp 1, not 8",
    ),
    "size without groups": (PAIR, ("workers.decode.size=2", "workers.decode.dp=16"), "need kind=lws, not statefulset"),
    "shm": (CPU, ("workers.decode.shm=2Gi",), "workers.decode.shm: 2Gi is not below resources.limits.memory 2Gi"),
    "shm in other units": (CPU, ("workers.decode.shm=2147484k",), "is not below resources.limits.memory 2Gi"),
    "start-up": (CPU, ("workers.decode.startup=719",), "719 s is shorter than config.timeouts.start + warmup = 720 s"),
    "replicas and autoscaling": (
        CPU,
        ("workers.decode.autoscaling.kind=hpa",),
        "workers.decode.replicas: must be null",
    ),
    "router's replicas": (CPU, ("router.autoscaling.kind=hpa",), "router.replicas: must be null with autoscaling"),
    "no replicas": (CPU, ("workerDefaults.replicas=null",), "replicas: required without autoscaling"),
    "limits of autoscaling": (
        CPU,
        tuple(f"workerDefaults.{item}" for item in HPA),
        "minReplicas 3 is above maxReplicas 2",
    ),
    "no workers": (CHART / "values.yaml", (), "workers: empty; start from a preset"),
    "prefill alone": (CPU, ("workers.decode=null",), "prefill and decode pools need each other"),
    "a pool without role": (
        CPU,
        ("workers.other.replicas=1",),
        'workers.other.role: required, because "other" is none',
    ),
    "layouts": (CPU, ("workers.decode.config.limits.page_size=32",), "config.limits.page_size differs between"),
    "types of KV": (CPU, ("workers.prefill.config.kv_dtype=bfloat16",), "config.kv_dtype differs between"),
    "no fabric": (PAIR, ("fabric.preset=",), "fabric.preset: required"),
    "TCP unsaid": (PAIR, ("fabric.preset=tcp-dev",), "fabric.allowTcp: must be true with fabric.preset=tcp-dev"),
    "privileged unsaid": (PAIR, ("fabric.privileged=true",), "fabric.acknowledgePrivileged: must be true"),
    "rack of single pods": (PAIR, ("workers.decode.topologyKey=rack",), "topologyKey: only with kind=lws"),
    "TLS without secrets": (
        CPU,
        ("tls.mode=secrets", "tls.routerSecret=a"),
        "tls.routerSecret, tls.workerSecret: required",
    ),
    "a public certificate alone": (CPU, ("tls.publicSecret=a",), "tls.publicSecret: needs tls.mode"),
    "a model without claim": (CPU, ("model.source=pvc",), "model.claim: required with model.source=pvc"),
    "a model from nowhere": (CPU, ("model.source=hf", "model.claim=a"), "model.uri, model.path: required"),
    "a model of no folder": (CPU, ("model.source=hostPath",), "model.hostPath: required"),
    "no path in the image": (CPU, ("model.path=",), "model.path: required with model.source=image"),
    "a cache without claim": (CPU, ("cache.kind=pvc",), "cache.claim: required"),
    "a cache without folder": (CPU, ("cache.kind=hostPath",), "cache.hostPath: required"),
    "a pool without picker": (CPU, ("gateway.inferencePool.enabled=true",), "endpointPicker.name: required"),
    "a route without gateway": (CPU, ("gateway.httpRoute.enabled=true",), "gateway.httpRoute.parentRefs: required"),
    "keys without one for the test": (CPU, ("apiKeys.secretName=a",), "test.apiKey.secretName: required with apiKeys"),
    "a long name": (
        CPU,
        (f"fullnameOverride={LONG}", "workers.a-long-name-of-pool.role=unified"),
        "has more than 52 characters",
    ),
}


@pytest.mark.parametrize("what", COMBINATIONS)
def test_a_combination_is_refused(what: str) -> None:
    file, sets, message = COMBINATIONS[what]
    with pytest.raises(ChartError) as caught:
        template((file,), sets)
    assert message in str(caught.value)


def test_parts_of_experts_need_not_divide_the_experts() -> None:
    ranks = ("workers.decode.size=9", "workers.decode.dp=1", "workers.decode.tp=72")
    with pytest.raises(ChartError, match=r"model\.routedExperts 256 cannot be divided"):
        template((GROUPS,), ranks)
    template((GROUPS,), (*ranks, "workers.decode.config.expert_tp=true"))


@pytest.mark.parametrize(
    "item",
    [
        "routr.replicas=1",
        "router.replica=1",
        "workers.decode.gpu=1",
        "workers.decode.kind=daemonset",
        "workers.decode.config.max_running=3",
        "workers.decode.config.limits.max_runing=3",
        "workers.decode.config.grpc_port=1",
        "workers.decode.config.limits.max_running=0",
        "router.config.tls.cert=a",
        "router.config.prefill_policy=best",
        "router.config.timeouts.drain=3",
        "fabric.preset=ethernet",
        "tracing.sample=2",
        "workers.Decode.replicas=1",
        "fabric.env.A-B=1",
    ],
)
def test_the_schema_refuses(item: str) -> None:
    with pytest.raises(ChartError, match="values don't meet the specifications of the schema"):
        template((CPU,), (item,))


def test_every_object_of_the_schema_is_closed_or_says_what_is_in_it() -> None:
    open_ones = []

    def look(node: object, path: str) -> None:
        if isinstance(node, dict):
            if node.get("properties") is not None and node.get("additionalProperties") is not False:
                open_ones.append(path)
            for key, value in node.items():
                look(value, f"{path}.{key}")
        elif isinstance(node, list):
            for index, value in enumerate(node):
                look(value, f"{path}[{index}]")

    look(json.loads((CHART / "values.schema.json").read_text()), "")
    assert not open_ones


def test_what_is_just_possible_is_not_refused(tmp_path: Path) -> None:
    sets = ("workers.decode.drain.timeout=90", "workers.decode.shm=2047Mi", "workers.decode.startup=720")
    assert objects(template((CPU,), sets))
