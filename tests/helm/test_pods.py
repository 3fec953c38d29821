"""What the owner of a cluster may give to pods and objects, beside the chart's own placement."""

import json

import pytest
from millrace_chart.render import Object
from millrace_testing.charts import of_kind, pods, rendered, spec_of

pytestmark = pytest.mark.helm
WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet")
DECODE, ROUTER = "Deployment/demo-millrace-decode", "Deployment/demo-millrace-router"


def workloads(items: list[Object]) -> dict[str, Object]:
    return {item["metadata"]["name"].removeprefix("demo-millrace-"): item for item in of_kind(items, *WORKLOADS)}


def test_every_object_takes_labels_and_annotations() -> None:
    given = ("labels.team=serving", "annotations.example\\.com/owner=serving")
    for name in ("extended", "tls", "keda", "route", "warm", "groups"):
        more = () if name == "extended" else given  # which has them
        for item in rendered(name, *more):
            where = f"{name}: {item['kind']}/{item['metadata']['name']}"
            assert item["metadata"]["labels"]["team"] == "serving", where
            assert item["metadata"]["annotations"]["example.com/owner"] == "serving", where


def test_users_label_never_changes_what_selects() -> None:
    items = rendered("cpu-tiny", "labels.app\\.kubernetes\\.io/component=mine")
    assert items[0]["metadata"]["labels"]["app.kubernetes.io/component"] != "mine"
    for item in workloads(items).values():
        labels = item["spec"]["template"]["metadata"]["labels"]
        assert item["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("where", [DECODE, ROUTER])
def test_routers_and_workers_take_what_a_pod_can_have(where: str) -> None:
    items = rendered("extended")
    spec = spec_of(items, where)
    main = spec["containers"][0]
    env = {entry["name"]: entry for entry in main["env"]}
    assert env["PLAIN"] == {"name": "PLAIN", "value": "16777216"}
    assert env["TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "tokens", "key": "token"}}
    assert env["NODE"]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert main["envFrom"] == [{"configMapRef": {"name": "more"}}]
    assert {"name": "extra", "mountPath": "/extra"} in main["volumeMounts"]
    assert {"name": "extra", "emptyDir": {}} in spec["volumes"]
    assert spec["containers"][1] == {"name": "side", "image": "side:1"}
    assert spec["initContainers"][0] == {"name": "first", "image": "first:1"}
    assert spec["resourceClaims"] == [{"name": "device", "resourceClaimTemplateName": "device"}]
    assert main["resources"]["claims"] == [{"name": "device"}]
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert (spec["nodeSelector"], spec["priorityClassName"]) == ({"zone": "a"}, "high")
    assert (spec["schedulerName"], spec["runtimeClassName"]) == ("other", "nvidia")
    assert {"key": "dedicated", "operator": "Exists"} in spec["tolerations"]
    item = workloads(items)[where.rsplit("-", 1)[1]]
    assert item["metadata"]["labels"]["example.com/tier"] == "gold"
    assert item["metadata"]["annotations"]["example.com/why"] == "test"
    pod = item["spec"]["template"]["metadata"]
    assert pod["labels"]["example.com/pod"] == pod["annotations"]["example.com/pod"] == "yes"
    assert "example.com/tier" not in pod["labels"]


def test_downloads_take_what_a_pod_can_have() -> None:
    (job,) = of_kind(rendered("extended"), "Job")
    pod = job["spec"]["template"]
    assert pod["metadata"]["labels"]["example.com/pod"] == pod["metadata"]["annotations"]["example.com/pod"] == "yes"
    spec, (main,) = pod["spec"], pod["spec"]["containers"]
    assert (spec["nodeSelector"], spec["priorityClassName"]) == ({"zone": "a"}, "high")
    assert spec["tolerations"] == [{"key": "dedicated", "operator": "Exists"}]
    assert list(spec["affinity"]) == ["nodeAffinity"]
    env = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in main["env"]}
    assert len(env) == len(main["env"]) and env["HTTPS_PROXY"] == "http://proxy:3128"
    assert env["HF_TOKEN"] == {"secretKeyRef": {"name": "tokens", "key": "token"}}
    assert {"name": "extra", "mountPath": "/extra"} in main["volumeMounts"]
    assert {"name": "extra", "emptyDir": {}} in spec["volumes"]


def test_downloads_trust_a_companys_authorities() -> None:
    own = "jobs.env.SSL_CERT_FILE=/own"
    (job,) = of_kind(rendered("extended", own), "Job")
    spec, (main,) = job["spec"]["template"]["spec"], job["spec"]["template"]["spec"]["containers"]
    (volume,) = (volume for volume in spec["volumes"] if volume["name"] == "ca")
    assert volume["configMap"] == {"name": "company", "items": [{"key": "ca-bundle.crt", "path": "ca.crt"}]}
    (folder,) = (mount["mountPath"] for mount in main["volumeMounts"] if mount["name"] == "ca")
    env = {entry["name"]: entry.get("value") for entry in main["env"]}
    assert env["AWS_CA_BUNDLE"] == env["REQUESTS_CA_BUNDLE"] == f"{folder}/ca.crt"
    assert env["SSL_CERT_FILE"] == "/own"
    (plain,) = of_kind(rendered("hf"), "Job")
    assert "ca.crt" not in json.dumps(plain)


def test_pod_of_helm_test_takes_what_quotas_taints_and_policies_want() -> None:
    (pod,) = of_kind(rendered("extended"), "Pod")
    spec, (main,) = pod["spec"], pod["spec"]["containers"]
    assert main["resources"]["limits"] == {"cpu": "200m", "memory": "256Mi", "ephemeral-storage": "100Mi"}
    assert (spec["nodeSelector"], spec["priorityClassName"]) == ({"zone": "a"}, "high")
    assert spec["tolerations"] == [{"key": "dedicated", "operator": "Exists"}]
    assert pod["metadata"]["labels"]["example.com/pod"] == pod["metadata"]["annotations"]["example.com/pod"] == "yes"
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"


def test_jobs_that_warm_caches_have_what_their_pool_and_all_jobs_have() -> None:
    at, place = "workerDefaults", "jobs.scheduling.nodeSelector.zone=b"
    volume = ("extraVolumes[0].name=extra", "extraVolumes[0].emptyDir.medium=Memory")
    mount = ("extraVolumeMounts[0].name=extra", "extraVolumeMounts[0].mountPath=/extra")
    more = [f"{part}.{item}" for part in (at, "jobs") for item in (*volume, *mount)]
    more += [f"{at}.env.A=pool", f"{at}.env.B=pool", f"{at}.scheduling.priorityClassName=high"]
    items = rendered("warm", *more, place, "jobs.env.A=job", "jobs.podLabels.a=b", "jobs.podAnnotations.c=d")
    jobs = [job["spec"]["template"] for job in of_kind(items, "Job")]
    assert len(jobs) == 2
    for pod in jobs:
        spec, (main,) = pod["spec"], pod["spec"]["containers"]
        env = {entry["name"]: entry.get("value") for entry in main["env"]}
        assert (env["A"], env["B"]) == ("job", "pool")
        assert [volume["name"] for volume in spec["volumes"]].count("extra") == 1
        assert [mount["name"] for mount in main["volumeMounts"]].count("extra") == 1
        assert spec["priorityClassName"] == "high" and "nodeSelector" not in spec
        assert (pod["metadata"]["labels"]["a"], pod["metadata"]["annotations"]["c"]) == ("b", "d")
    worker = spec_of(items, DECODE)["containers"][0]
    assert {"name": "A", "value": "pool"} in worker["env"]


def test_each_kind_of_pod_has_its_own_account() -> None:
    items = rendered("extended")
    assert spec_of(items, DECODE)["serviceAccountName"] == "workload-identity"
    assert spec_of(items, ROUTER)["serviceAccountName"] == "demo-millrace-router"
    (job,) = of_kind(items, "Job")
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == "workload-identity"


def test_pool_replaces_what_the_defaults_have() -> None:
    """Also a list with none, and where a variable is from."""
    sets = ["workerDefaults.env.A=1", "workerDefaults.env.B.secretKeyRef.key=b"]
    sets += ["workers.decode.env.A.fieldRef.fieldPath=c", "workers.decode.env.B.configMapKeyRef.key=d"]
    spec = spec_of(rendered("groups", *sets), "LeaderWorkerSet/demo-millrace-decode/leaderTemplate")
    env = {entry["name"]: entry.get("valueFrom") for entry in spec["containers"][0]["env"]}
    assert (env["A"], env["B"]) == ({"fieldRef": {"fieldPath": "c"}}, {"configMapKeyRef": {"key": "d"}})
    assert "topologySpreadConstraints" not in spec, "groups.yaml has an empty list"


def test_gpus_may_come_by_claims_alone() -> None:
    more = ("gpuResource=", "resourceClaims[0].name=gpus", "resourceClaims[0].resourceClaimTemplateName=eight-gpus")
    items = rendered("h200-1p1d-16gpu", *(f"workerDefaults.{item}" for item in more))
    for container in (spec_of(items, DECODE)["containers"][0], spec_of(items, DECODE)["initContainers"][-1]):
        assert container["resources"]["claims"] == [{"name": "gpus"}]
        assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_own_affinity_replaces_the_charts_of_that_kind_only() -> None:
    at = "workerDefaults.scheduling.affinity"
    mine = f"{at}.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey=rack"
    affinity = spec_of(rendered("aws-efa", mine), DECODE)["affinity"]
    assert set(affinity) == {"nodeAffinity", "podAffinity", "podAntiAffinity"}
    assert affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == [{"topologyKey": "rack"}]


def test_group_stays_within_a_domain_without_keeping_others_out() -> None:
    items = rendered("rack")
    for part in ("leaderTemplate", "workerTemplate"):
        affinity = spec_of(items, f"LeaderWorkerSet/demo-millrace-decode/{part}")["affinity"]["podAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
        assert (term["topologyKey"], term["matchLabelKeys"]) == ("rack", ["leaderworkerset.sigs.k8s.io/group-key"])
        labels = workloads(items)["decode"]["spec"]["leaderWorkerTemplate"][part]["metadata"]["labels"]
        assert term["labelSelector"]["matchLabels"].items() <= labels.items(), "or the first pod finds no place"
        affinity = spec_of(items, f"LeaderWorkerSet/demo-millrace-prefill/{part}")["affinity"]["podAffinity"]
        (wish,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
        assert wish["podAffinityTerm"]["topologyKey"] == "rack"
    key = "leaderworkerset.sigs.k8s.io/exclusive-topology"
    assert key not in workloads(items)["decode"]["metadata"].get("annotations", {})
    own = rendered("own-rack")
    assert workloads(own)["decode"]["metadata"]["annotations"][key] == "rack"
    assert "podAffinity" not in spec_of(own, "LeaderWorkerSet/demo-millrace-decode/leaderTemplate")["affinity"]


def test_queue_takes_a_worker_whole() -> None:
    group = workloads(rendered("kueue"))["decode"]
    assert group["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    items = rendered("volcano-groups")
    group = workloads(items)["decode"]
    assert group["metadata"]["annotations"]["scheduling.volcano.sh/queue-name"] == "gpus"
    for part in ("leaderTemplate", "workerTemplate"):
        assert spec_of(items, f"LeaderWorkerSet/demo-millrace-decode/{part}")["schedulerName"] == "volcano"
    pod = workloads(rendered("volcano"))["decode"]["spec"]["template"]
    assert pod["metadata"]["annotations"]["scheduling.volcano.sh/queue-name"] == "gpus"
    assert pod["spec"]["schedulerName"] == "volcano"
    assert "schedulerName" not in spec_of(rendered("volcano"), ROUTER)


def test_workers_run_as_root_only_where_that_is_said() -> None:
    spec = spec_of(rendered("root"), DECODE)
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsNonRoot"]) == (0, False)
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert spec_of(rendered("root"), ROUTER)["securityContext"]["runAsUser"] == 10001


@pytest.mark.parametrize("name", ["h200-1p1d-16gpu", "keys", "secrets", "groups"])
def test_secret_of_a_pod_is_for_its_group_alone(name: str) -> None:
    for where, spec in pods(rendered(name)):
        assert spec["securityContext"].get("fsGroupChangePolicy") == "OnRootMismatch", "a chown of terabytes"
        for volume in spec["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440, f"{where}: {volume['name']}"


@pytest.mark.parametrize("name", ["cpu-tiny", "groups", "hf", "warm"])
def test_platform_may_choose_who_pods_run_as(name: str) -> None:
    """OpenShift's restricted-v2 refuses every user and group but those of the namespace, which no chart knows."""
    more = ("podSecurity.runAsUser=null", "podSecurity.fsGroup=null", "cache.kind=pvc", "cache.claim=cache")
    for where, spec in pods(rendered(name, *more)):
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True, where
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & context.keys(), where
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert "runAsUser" not in container["securityContext"], where


@pytest.mark.parametrize("name", ["cpu-tiny", "h200-1p1d-16gpu", "groups", "hf", "warm"])
def test_quotas_and_guaranteed_pods_find_resources_in_every_container(name: str) -> None:
    """A quota refuses a pod for one container without them; whole cores near the GPUs are for Guaranteed pods alone."""
    same = ("requests.cpu=8", "requests.memory=64Gi", "limits.cpu=8", "limits.memory=64Gi")
    more = [f"{at}.resources.{item}" for at in ("router", "workers.prefill", "workers.decode") for item in same]
    for where, spec in pods(rendered(name, *more)):
        containers = [*spec.get("initContainers", []), *spec["containers"]]
        for container in containers:
            given = container["resources"]
            assert {"cpu", "memory"} <= set(given["requests"]), f"{where}: {container['name']}"
            if container["name"] not in ("download", "request"):  # with resources of their own
                assert all(given["limits"][key] == given["requests"][key] for key in ("cpu", "memory")), where


def test_processes_listen_on_ipv6_where_that_is_all_there_is() -> None:
    data = [item["data"] for item in of_kind(rendered("ipv6"), "ConfigMap")]
    texts = [files["config.yaml"] for files in data if "config.yaml" in files]
    assert len(texts) == 3
    for text in texts:
        assert "[::]" in text and "0.0.0.0" not in text
