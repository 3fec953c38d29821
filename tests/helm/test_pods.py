"""What the owner of a cluster may give to pods and objects, beside the chart's own placement."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from millrace_chart.render import CHART, Object, objects, preset_file, template, values
from millrace_testing import kube_schema
from millrace_testing.charts import NO_DASHBOARDS, TABLES, VARIANTS, of_kind, pods, rendered, spec_of

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


SECTIONS = {"router": "router", "workerDefaults": "pool", "jobs": "jobs", "test": "test"}
PODS = {  # by the columns of the table: the object, its kind, and the sections that may give it something
    "router": ("router", ("Deployment",), ("router",)),
    "worker": ("decode", ("Deployment", "LeaderWorkerSet"), ("pool",)),
    "warming job": ("decode-warm", ("Job",), ("pool", "jobs")),
    "download": ("download-", ("Job",), ("jobs",)),
    "`helm test`": ("test", ("Pod",), ("test",)),
}
EVERYWHERE = {"imagePullSecrets": [{"name": "all"}], "labels": {"all": "a"}, "annotations": {"all": "a"}}


def table() -> dict[str, dict[str, str]]:
    """What the README says that each pod gets, by row and column."""
    text = (CHART / "README.md").read_text().partition("| of each pod |")[2].partition("\n\n")[0]
    head, _, *rows = ([cell.strip() for cell in line.split("|")[:-1]] for line in text.splitlines())
    return {row[1].strip("`"): dict(zip(head, row[2:], strict=True)) for row in rows}


@pytest.mark.parametrize("kind", ["deployment", "lws"])
def test_each_pod_gets_what_the_readme_says_and_nothing_is_given_for_nothing(kind: str, tmp_path: Path) -> None:
    """A value that is given in every section comes from those that the table names, and from no other."""
    given = values()
    more: dict[str, Any] = {section: {"scheduling": {}} for section in SECTIONS}
    for section, mark in SECTIONS.items():
        for name, (example, _) in TABLES["pods"].items():
            marked = json.loads(json.dumps(example).replace("MARK", f"of{mark}"))
            if name in given[section]:
                more[section][name] = marked
            elif name in given[section]["scheduling"]:
                more[section]["scheduling"][name] = marked
    more["workerDefaults"] |= {"kind": kind, "gpuModel": ""}
    model = {"source": "hf", "uri": "a/b", "path": "c", "claim": "d"}
    cache = {"kind": "pvc", "claim": "e", "warm": True}
    more |= {**EVERYWHERE, "model": model, "cache": cache}
    items = value("h200-1p1d-16gpu", more, tmp_path)
    assert not [problem for item in of_kind(items, *WORKLOADS, "Job", "Pod") for problem in kube_schema.check(item)]
    said = table()
    assert said.keys() == TABLES["pods"].keys()
    for column, (name, kinds, sections) in PODS.items():
        found = [it for it in of_kind(items, *kinds) if it["metadata"]["name"].startswith(f"demo-millrace-{name}")]
        for pod in (pod for item in found for pod in templates(item)):
            for row, (_, path) in TABLES["pods"].items():
                text = json.dumps(at(pod, path) or "")
                by = [mark for mark in sections if f"of{mark}" in text]
                if row in ("hostNetwork", "dnsPolicy") and text != '""':
                    by = [sections[0]]
                assert said[row][column] == (" and ".join(by) or "no"), f"{row} of {column}"
            assert at(pod, ["spec", "imagePullSecrets"]) == [{"name": "all"}], column
            assert at(pod, ["metadata", "labels", "all"]) == at(pod, ["metadata", "annotations", "all"]) == "a", column


def templates(item: Object) -> Iterator[Object]:
    """Of an object's pods, with their first container as `main` and the others as `sides`."""
    group = item["spec"].get("leaderWorkerTemplate", {"one": item["spec"].get("template", item)})
    for pod in (group[part] for part in ("leaderTemplate", "workerTemplate", "one") if part in group):
        main, *sides = pod["spec"]["containers"]
        yield {**pod, "main": main, "sides": sides}


def at(node: Any, path: Iterable[str | int]) -> Any:
    """None where there is nothing."""
    for part in path:
        if isinstance(node, list) and isinstance(part, str):
            node = next((item for item in node if item["name"] == part), None)
        elif node is not None:
            node = node[part] if isinstance(node, list) else node.get(part)
    return node


def value(name: str, given: dict[str, Any], folder: Path) -> list[Object]:
    """The objects of a variant or a preset with values beside it."""
    (folder / "values.yaml").write_text(yaml.safe_dump(given))
    file, sets = VARIANTS[name] if name in VARIANTS else (preset_file(name), ())
    return objects(template((file, folder / "values.yaml"), (NO_DASHBOARDS, *sets)))


@pytest.mark.parametrize(("name", "given", "places"), [(name, given, rest) for name, given, *rest in TABLES["found"]])
def test_value_is_found_where_it_belongs(name: str, given: dict[str, Any], places: list[Any], tmp_path: Path) -> None:
    made = value(name, given, tmp_path)
    for where, path, expected in places:
        kind, _, name = where.partition("/")  # or the beginning of a Job's name
        (item,) = (
            it for it in of_kind(made, kind) if f"{it['metadata']['name']}-".startswith(f"demo-millrace-{name}-")
        )
        assert at(item, path) == expected, f"{where}: {path}"


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
