"""Values that cannot work are refused while the chart renders, with a message that names them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from millrace_bench.v3 import V3
from millrace_chart.render import CHART, ChartError, objects, presets, template
from millrace_serve.engine.config import Role
from millrace_serve.model.config import ModelConfig
from millrace_serve.plan.settings import Goal, Setup, decide
from millrace_testing.charts import CPU, GROUPS, PAIR, VARIANTS, of_kind, pods, rendered

pytestmark = pytest.mark.helm
HPA = ("autoscaling.kind=hpa", "autoscaling.minReplicas=3", "autoscaling.maxReplicas=2", "replicas=null")
NEXT, NEXT_SETS = VARIANTS["next"]
LONG = "a-name-that-is-as-long-as-names-can-be-x"
COMBINATIONS = {
    "grace of a worker": (  # 15 + 90 + 30 + 15
        CPU,
        ("workers.decode.terminationGracePeriodSeconds=149",),
        "149 is too short: drain.preStop 15 + drain.timeout 90 + config.timeouts.lease + 15 = 150",
    ),
    "grace and a long lease": (
        CPU,
        ("workers.decode.terminationGracePeriodSeconds=150", "workers.decode.config.timeouts.lease=300"),
        "= 420",
    ),
    "grace of the router": (
        CPU,
        ("router.terminationGracePeriodSeconds=924",),
        "router.terminationGracePeriodSeconds: 924 is too short: drain.preStop 10 + drain.timeout 900 + 15 = 925",
    ),
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
    **{
        f"a pool called {name}": (
            CPU,
            (f"workers.{name}.role=decode",),
            f"workers.{name}: objects of the chart have this name",
        )
        for name in ("router", "router-pods", "test", "ray", "secret", "a-leaders", "decode-warm")
    },
    **{
        f"the chart's {name}": (CPU, (f"{at}.env.{name}=a",), f"env.{name}: the chart sets this variable itself")
        for at, name in (
            ("router", "HOME"),
            ("workers.decode", "POD_IP"),
            ("workers.prefill", "RAY_PORT"),
            ("router", "MILLRACE_RUN"),
        )
    },
    **{
        f"a download's {name}": (
            CPU,
            ("model.source=s3", "model.uri=s3://a/b", "model.path=b", "model.claim=c", f"jobs.env.{name}=a"),
            f"jobs.env.{name}: the chart sets this variable itself",
        )
        for name in ("HOME", "URI", "HF_HOME")
    },
    **{
        f"a {kind} called {name} twice": (
            CPU,
            (f"{at}.{kind}[0].name={name}",),
            f"{at}.{kind}: {name} is a name that the chart uses itself",
        )
        for at, kind, name in (
            ("router", "extraContainers", "router"),
            ("router", "extraInitContainers", "preflight"),
            ("workers.decode", "extraContainers", "worker"),
            ("workers.decode", "extraVolumes", "model"),
        )
    },
    **{
        f"nobody serves, {at}": (CPU, (f"{at}.replicas=0",), f"{at}.replicas: 0 serves nobody")
        for at in ("router", "workers.decode")
    },
    **{
        f"no drain, {most}": (CPU, (f"router.pdb.maxUnavailable={most}",), "no node can ever be drained")
        for most in ("0", "0%")
    },
    "no drain of workers": (CPU, ("workers.decode.pdb.maxUnavailable=0",), "workers.decode.pdb.maxUnavailable: with 0"),
    "an HPA without a request": (
        CPU,
        ("router.autoscaling.kind=hpa", "router.replicas=null", "router.resources.requests.cpu=null"),
        "router.resources.requests.cpu: required with router.autoscaling.kind=hpa",
    ),
    "a node port of no node": (CPU, ("router.service.nodePorts.http=30080",), "needs type NodePort or LoadBalancer"),
    **{
        f"{field} of a {kind}": (
            CPU,
            (f"router.service.type={kind}", f"router.service.spec.{field}={value}"),
            f"router.service.spec.{field}: needs type {needed}, not {kind}",
        )
        for field, value, kind, needed in (
            ("externalTrafficPolicy", "Local", "ClusterIP", "NodePort or LoadBalancer"),
            ("loadBalancerClass", "a", "NodePort", "LoadBalancer"),
            ("loadBalancerSourceRanges", "{10.0.0.0/8}", "ClusterIP", "LoadBalancer"),
            ("allocateLoadBalancerNodePorts", "false", "ClusterIP", "LoadBalancer"),
        )
    },
    "size without groups": (PAIR, ("workers.decode.size=2", "workers.decode.dp=16"), "need kind=lws, not deployment"),
    "shm": (CPU, ("workers.decode.shm=2Gi",), "workers.decode.shm: 2Gi is not below resources.limits.memory 2Gi"),
    "disk tier without a volume": (
        CPU,
        ("workers.decode.config.limits.disk_cache=/kv",),
        "workers.decode.diskCache.kind: required with config.limits.disk_cache=/kv (emptyDir, hostPath or pvc)",
    ),
    "disk tier beside its volume": (
        CPU,
        (
            "workers.decode.config.limits.disk_cache=/kvs",
            "workers.decode.extraVolumeMounts[0].name=kv",
            "workers.decode.extraVolumeMounts[0].mountPath=/kv",
        ),
        "workers.decode.diskCache.kind: required",
    ),
    "volume without a disk tier": (
        CPU,
        ("workers.decode.diskCache.kind=emptyDir",),
        "workers.decode.diskCache.kind: emptyDir needs config.limits.disk_cache",
    ),
    "disk tier in a relative folder": (
        CPU,
        ("workers.decode.config.limits.disk_cache=kv", "workers.decode.diskCache.kind=emptyDir"),
        "workers.decode.config.limits.disk_cache: kv is no absolute path",
    ),
    "disk tier above the storage": (
        CPU,
        (
            "workers.decode.config.limits.disk_cache=/kv",
            "workers.decode.diskCache.kind=emptyDir",
            "workers.decode.diskCache.size=20Gi",
            "workers.decode.resources.limits.ephemeral-storage=20Gi",
        ),
        "workers.decode.diskCache.size: 20Gi is not below resources.limits.ephemeral-storage 20Gi",
    ),
    **{
        f"disk tier on {kind}": (
            CPU,
            ("workers.decode.config.limits.disk_cache=/kv", f"workers.decode.diskCache.kind={kind}"),
            f"workers.decode.diskCache.{key}: required with kind={kind}",
        )
        for kind, key in (("pvc", "claim"), ("hostPath", "hostPath"))
    },
    "shm in other units": (CPU, ("workers.decode.shm=2148M",), "is not below resources.limits.memory 2Gi"),
    "start-up": (CPU, ("workers.decode.startup=719",), "719 s is shorter than config.timeouts.start + warmup = 720 s"),
    "replicas and autoscaling": (
        CPU,
        ("workers.decode.autoscaling.kind=hpa",),
        "workers.decode.replicas: must be null",
    ),
    "router's replicas": (CPU, ("router.autoscaling.kind=hpa",), "router.replicas: must be null with autoscaling"),
    "a target with a unit": (
        CPU,
        (
            "workers.decode.autoscaling.kind=keda",
            "workers.decode.autoscaling.target=800m",
            "workers.decode.replicas=null",
        ),
        "workers.decode.autoscaling.target: KEDA takes a plain number, not 800m",
    ),
    "a query for the HPA": (
        CPU,
        ("workers.decode.autoscaling.kind=hpa", "workers.decode.autoscaling.query=up", "workers.decode.replicas=null"),
        "workers.decode.autoscaling.query: only with kind=keda",
    ),
    "no replicas": (CPU, ("workerDefaults.replicas=null",), "replicas: required without autoscaling"),
    "limits of autoscaling": (
        CPU,
        tuple(f"workerDefaults.{item}" for item in HPA),
        "minReplicas 3 is above maxReplicas 2",
    ),
    "no workers": (CPU, ("workers.decode=null", "workers.prefill=null"), "workers: every pool is null"),
    "prefill alone": (CPU, ("workers.decode=null",), "prefill and decode pools need each other"),
    "a pool without role": (
        CPU,
        ("workers.other.replicas=1",),
        'workers.other.role: required, because "other" is none',
    ),
    "layouts": (CPU, ("workers.decode.config.limits.page_size=32",), "config.limits.page_size differs between"),
    "canaries": (CPU, ("workers.prefill.config.limits.checks={canary}",), "config.limits.checks differs between"),
    "types of KV": (CPU, ("workers.prefill.config.kv_dtype=bfloat16",), "config.kv_dtype differs between"),
    "types of KV by goal": (PAIR, ("workers.decode.config.goal=throughput",), "config.kv_dtype differs between"),
    "drafts": (PAIR, ("workers.prefill.config.limits.draft_tokens=0",), "config.limits.draft_tokens differs between"),
    "prompts without graphs": (
        PAIR,
        ("workers.decode.config.chunk_graph_tokens=128",),
        "workers.decode.config.chunk_graph_tokens: 128 is below router.config.routing.local_prefill_tokens 256",
    ),
    "no fabric": (PAIR, ("fabric.preset=",), "fabric.preset: required"),
    "TCP unsaid": (PAIR, ("fabric.preset=tcp-dev",), "fabric.allowTcp: must be true with fabric.preset=tcp-dev"),
    "privileged unsaid": (PAIR, ("fabric.privileged=true",), "fabric.acknowledgePrivileged: must be true"),
    "rack of single pods": (PAIR, ("workers.decode.topology.key=rack",), "topology: only with kind=lws"),
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
    "a folder of a node for nobody": (
        CPU,
        ("cache.kind=hostPath", "cache.hostPath=/c", "podSecurity.fsGroup=null"),
        "podSecurity.runAsUser, podSecurity.fsGroup: required with cache.kind=hostPath",
    ),
    "a disk tier for nobody": (
        CPU,
        (
            "workers.decode.config.limits.disk_cache=/kv",
            "workers.decode.diskCache.kind=hostPath",
            "workers.decode.diskCache.hostPath=/c",
            "podSecurity.runAsUser=null",
        ),
        "podSecurity.fsGroup: required with workers.decode.diskCache.kind=hostPath",
    ),
    "a cache without claim": (CPU, ("cache.kind=pvc",), "cache.claim: required"),
    "a cache without folder": (CPU, ("cache.kind=hostPath",), "cache.hostPath: required"),
    "a pool without picker": (CPU, ("gateway.inferencePool.enabled=true",), "endpointPicker.name: required"),
    "a route without gateway": (CPU, ("gateway.httpRoute.enabled=true",), "gateway.httpRoute.parentRefs: required"),
    "keys without one for the test": (
        CPU,
        ("apiKeys.secretName=a", "tls.mode=certManager"),
        "test.apiKey.secretName: required with apiKeys",
    ),
    "keys in plain text": (
        CPU,
        (
            "apiKeys.secretName=a",
            "test.apiKey.secretName=b",
            "gateway.httpRoute.enabled=true",
            "gateway.httpRoute.parentRefs[0].name=g",
        ),
        "apiKeys.secretName: needs tls.mode certManager or secrets",
    ),
    "images from nowhere": (PAIR, ("images.registry=",), "images.registry: required for the GPUs of workers.decode"),
    "two ports alike": (
        CPU,
        ("workers.decode.ports.health=9090",),
        "workers.decode.ports: health and metrics are both 9090",
    ),
    "two ports of the router alike": (CPU, ("router.ports.http=50051",), "router.ports: grpc and http are both 50051"),
    "two ports of Ray alike": (GROUPS, ("ray.ports.gcs=6380",), "ray.ports: gcs and nodeManager are both 6380"),
    "a port of Ray and of the worker": (GROUPS, ("ray.ports.gcs=50061",), "ray.ports: gcs and grpc are both 50061"),
    "no ports for Ray's workers": (
        GROUPS,
        ("ray.ports.workers.max=10001",),
        "ray.ports.workers: 10002 to 10001 is too few",
    ),
    "few ports for Ray's workers": (GROUPS, ("ray.ports.workers.max=10033",), "is too few for 8 ranks of a pod"),
    "a port among Ray's workers'": (
        GROUPS,
        ("ray.ports.workers.min=50000", "ray.ports.workers.max=51000"),
        "ray.ports.workers: 50000 to 51000 has the port 50061 of grpc",
    ),
    "requests above limits": (
        CPU,
        ("workers.decode.resources.requests.memory=3Gi",),
        "workers.decode.resources.requests.memory: 3Gi is above the limit 2Gi",
    ),
    "requests above limits of the test": (
        CPU,
        ("test.resources.requests.memory=1Gi",),
        "test.resources.requests.memory: 1Gi is above the limit 256Mi",
    ),
    "requests of CPUs above limits": (
        CPU,
        ("router.resources.requests.cpu=500m", "router.resources.limits.cpu=0.25"),
        "router.resources.requests.cpu: 500m is above the limit 0.25",
    ),
    "a path that leaves the volume": (CPU, ("model.path=../etc",), "model.path: ../etc must not have .. in it"),
    "an image with a scheme": (
        CPU,
        ("model.source=oci", "model.uri=https://ghcr.io/a:b", "model.path=c", "model.claim=d"),
        "model.uri: https://ghcr.io/a:b must not begin with http:// or https://",
    ),
    "a repository that is an address": (
        CPU,
        ("model.source=hf", "model.uri=huggingface.co/a/b", "model.path=c", "model.claim=d"),
        "model.uri: huggingface.co/a/b is not owner/name",
    ),
    "a bucket without scheme": (
        CPU,
        ("model.source=s3", "model.uri=a/b", "model.path=c", "model.claim=d"),
        "model.uri: a/b is not s3://bucket/prefix",
    ),
    "a pool's model without claim": (
        CPU,
        ("workers.decode.model.source=pvc",),
        "workers.decode.model.claim: required with model.source=pvc",
    ),
    "a warm cache of a node": (PAIR, ("cache.warm=true",), "cache.warm: needs cache.kind=pvc, not emptyDir"),
    "a warm cache of a group": (
        GROUPS,
        ("cache.kind=pvc", "cache.claim=c", "cache.warm=true"),
        "cache.warm: workers.decode has workers of 8 pods, and a job has one",
    ),
    "a gang without queue": (GROUPS, ("workers.decode.gang.kind=kueue",), "workers.decode.gang.queue: required"),
    "GPUs by nobody": (
        PAIR,
        ("workers.decode.gpuResource=",),
        "workers.decode.gpuResource: required, or resourceClaims",
    ),
    "a revision of one role": (
        CPU,
        ("workers.next.role=decode", "workers.next.revision=b"),
        "workers: prefill and decode pools of revision b need each other",
    ),
    "layouts of a revision": (
        NEXT,
        (*NEXT_SETS, "workers.decode-b.config.limits.page_size=16"),
        "config.limits.page_size differs between decode-b and prefill-b of revision b",
    ),
    "a node's ports twice": (
        CPU,
        ("workers.decode.hostNetwork=true", "workers.decode.replicas=2"),
        "workers.decode.hostNetwork: two pods of one node would share ports",
    ),
    "admin ports of a node": (
        CPU,
        ("router.hostNetwork=true", "router.adminHost=0.0.0.0", "tls.mode=certManager"),
        "router.adminHost: 0.0.0.0 with router.hostNetwork",
    ),
    "admin ports for everybody": (
        CPU,
        ("router.adminHost=0.0.0.0",),
        "router.adminHost: 0.0.0.0 needs tls.mode: the token",
    ),
    "egress alone": (
        CPU,
        ("networkPolicy.egress.enabled=true", "networkPolicy.enabled=false"),
        "networkPolicy.egress.enabled: needs networkPolicy.enabled",
    ),
    "a long name": (
        CPU,
        (f"fullnameOverride={LONG}", "workers.a-long-name-of-pool.role=unified"),
        "has more than 52 characters",
    ),
}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "[::1]", "localhost"])
def test_admin_ports_of_a_pods_loopback_need_no_tls(host: str) -> None:
    template((CPU,), (f"router.adminHost={host}", "router.hostNetwork=true"))
    template((CPU,), ("router.adminHost=0.0.0.0", "tls.mode=certManager"))


@pytest.mark.parametrize("what", COMBINATIONS)
def test_a_combination_is_refused(what: str) -> None:
    file, sets, message = COMBINATIONS[what]
    with pytest.raises(ChartError) as caught:
        template((file,), sets)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["cpu-tiny", "h200-1p1d-16gpu", "groups"])
@pytest.mark.parametrize("part", ["router", "decode"])
def test_no_variable_is_set_twice(name: str, part: str) -> None:
    """Helm 4 and Argo CD apply in a way that refuses it. What the chart sets itself is refused, or is the user's."""
    at = "router" if part == "router" else f"workers.{part}"

    def variables(*sets: str) -> list[str]:
        found = pods(of_kind(rendered(name, *sets), "Deployment", "LeaderWorkerSet"))
        (spec, *_) = (spec for where, spec in found if where.split("/")[1] == f"demo-millrace-{part}")
        return [entry["name"] for entry in spec["containers"][0]["env"]]

    refused = set()
    for variable in variables():
        try:
            assert variables(f"{at}.env.{variable}=a").count(variable) == 1
        except ChartError as error:
            assert f"{at}.env.{variable}: the chart sets this variable itself" in str(error)
            refused.add(variable)
    assert {"POD_NAME", "POD_IP", "HOME", "MILLRACE_RUN"} <= refused


POOL = (  # kinds that are called as their pool
    *("Service", "Deployment", "StatefulSet", "LeaderWorkerSet", "NetworkPolicy"),
    *("PodDisruptionBudget", "HorizontalPodAutoscaler", "ScaledObject"),
)


def test_no_pool_takes_the_name_of_another_object() -> None:
    """An upgrade would end half-way, or an object would be two things in turn."""
    names = {
        item["metadata"]["name"].removeprefix("demo-millrace-")
        for variant in [*presets(), *VARIANTS]
        for item in of_kind(rendered(variant), *POOL)
        if item["metadata"]["name"] != f"demo-millrace-{item['metadata']['labels'].get('millrace/pool')}"
    }
    assert {"router", "router-pods", "prefill-leaders", "egress-router"} <= names
    for name in sorted(names):
        with pytest.raises(ChartError, match=f"workers.{name}: objects of the chart have this name"):
            template((CPU,), (f"workers.{name}.role=decode",))


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
        "workers.decode.env.A-B=1",
        "workers.decode.env.A.valueFrom=b",
        "workers.decode.env.A.secret=b",
        "workerDefaults.gang.kind=cron",
        "workerDefaults.topology.mode=near",
        "workers.decode.revision=a b",
        "workers.decode.pdb.maxUnavailable=banana",
        "workers.decode.shm=lots",
        "cache.size=1Ki",
        "cache.hostPath=cache",
        "model.hostPath=models",
        "workers.decode.resources.limits.memory=lots",
        "router.dnsPolicy=mine",
        "router.service.nodePorts.http=80",
        "router.service.spec.clusterIP=None",
        "router.service.spec.ports[0].port=1",
        "router.service.spec.type=LoadBalancer",
        "router.service.externalTrafficPolicy=Local",
        f"labels.team={'a' * 64}",
        "router.labels.team=a b",
        "router.podLabels.a b=c",
        "workers.decode.podLabels.team=-a",
        "workers.decode.scheduling.nodeSelector.zone=a/b",
        "monitoring.labels.release=a b",
        "monitoring.dashboards.labels.a/b/c=d",
        "annotations.a b=c",
        "jobs.scheduling.nodeSelector.zone=a b",
        "networkPolicy.clients[0].podSelectors.matchLabels.a=b",
        "networkPolicy.monitoring[0].from=a",
        "networkPolicy.egress.apiServer[0].cidr=10.0.0.1/32",
        "networkPolicy.egress.more[0].from=a",
        "gateway.httpRoute.parentRefs[0].nam=a",
        "gateway.grpcRoute.parentRefs[0].namespace=a",
        "router.scheduling.spread[0]=a b",
        "router.extraContainers[0].image=a",
        "workers.decode.extraVolumes[0].emptyDir=a",
        "jobs.ttlSecondsAfterFinished=-1",
        "monitoring.runbooks=docs/alerts",
        "monitoring.grafana=grafana:3000",
        "images.registry=https://ghcr.io/acme",
        "podSecurity.runAsUser=0",
        "router.scheduling.affinity.nodes=a",
    ],
)
def test_the_schema_refuses(item: str) -> None:
    with pytest.raises(ChartError, match="values don't meet the specifications of the schema") as caught:
        template((CPU,), (item,))
    assert "validate" not in str(caught.value), "it says what is wrong, not how it was found out"


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
    grace = ("workers.decode.terminationGracePeriodSeconds=150", "router.terminationGracePeriodSeconds=925")
    sets = (*grace, "workers.decode.shm=2047Mi", "workers.decode.startup=720")
    assert objects(template((CPU,), sets))


@pytest.mark.parametrize("prefill", Goal)
@pytest.mark.parametrize("decode", Goal)
def test_goals_may_differ_where_pages_do_not(prefill: Goal, decode: Goal) -> None:
    """As the plan decides them."""
    model = ModelConfig(num_hidden_layers=61, num_nextn_predict_layers=1, **V3)
    goals = {Role.PREFILL: prefill, Role.DECODE: decode}
    chosen = [decide(Setup(model, "H200", 1, 8, role, goal)) for role, goal in goals.items()]
    kinds = {choice.value for choices in chosen for choice in choices if choice.key == "kv_dtype"}
    sets = tuple(f"workers.{role}.config.goal={goal}" for role, goal in goals.items())
    with pytest.raises(ChartError, match=r"config\.kv_dtype differs") if len(kinds) > 1 else nullcontext():
        template((PAIR,), sets)
