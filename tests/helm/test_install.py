"""What an install, an upgrade and a dead node do with the objects of the chart."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from millrace_chart.render import CHART, NAMESPACE, Object, objects, presets, run, template
from millrace_router.config import RouterConfig
from millrace_serve.worker.config import WorkerConfig
from millrace_testing.charts import (
    CPU,
    EVERYTHING,
    GIVEN,
    GROUPS,
    PAIR,
    VARIANTS,
    config_of,
    named,
    of_kind,
    pods,
    rendered,
    spec_of,
)
from yamllint import linter
from yamllint.config import YamlLintConfig

pytestmark = pytest.mark.helm
WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet")
DISK = tuple(
    f"workerDefaults.{item}"
    for item in (
        "config.limits.disk_cache=/kv",
        "config.limits.host_cache_gib=1",
        "diskCache.kind=emptyDir",
        "diskCache.size=1Gi",
    )
)


# ---------------------------------------------------------------------------------------------------- defaults


def test_bare_chart_serves_as_its_preset() -> None:
    command = ["template", "demo", str(CHART), "--namespace", NAMESPACE, "--kube-version", "1.31.0", "--set", GIVEN]
    bare = objects(run(command))
    assert {item["metadata"]["name"] for item in of_kind(bare, *WORKLOADS)} == {
        f"demo-millrace-{part}" for part in ("router", "prefill", "decode")
    }
    assert bare == objects(run([*command, "-f", str(CPU)])), "the default is the preset"
    images = {container["image"] for _, spec in pods(bare) for container in spec["containers"]}
    assert images == {"millrace-router:0.1.0", "millrace-worker:0.1.0-cpu"}


def test_chart_testing_finds_nothing_in_the_yaml() -> None:
    """The rules by which `ct lint` reads a chart, beside `helm lint --strict`."""
    config = YamlLintConfig("{extends: default, rules: {line-length: disable, document-start: disable}}")
    for path in (CHART / "Chart.yaml", CHART / "values.yaml", *CHART.glob("p*s/*.yaml")):  # presets and platforms
        assert not [str(problem) for problem in linter.run(path.read_text(), config)], path.name


def test_defaults_pools_can_be_changed_together() -> None:
    items = objects(template((CHART / "values.yaml",), ("workerDefaults.replicas=2",)))
    replicas = {item["metadata"]["name"]: item["spec"]["replicas"] for item in of_kind(items, "Deployment")}
    assert replicas == {"demo-millrace-router": 1, "demo-millrace-prefill": 2, "demo-millrace-decode": 2}


@pytest.mark.parametrize("name", presets())
def test_presets_need_no_folder_of_a_node(name: str) -> None:
    """Its path, its mount options and who may use it differ from platform to platform."""
    for where, spec in pods(rendered(name)):
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume], where


# ---------------------------------------------------------------------------------------------------- images


def test_digest_wins_and_names_the_caches() -> None:
    digest = "sha256:" + "ab" * 32
    items = objects(template((PAIR,), (f"images.gpuWorker.digest={digest}", "images.gpuWorker.tag=x")))
    spec = spec_of(items)
    assert spec["containers"][0]["image"].endswith(f"millrace-worker-gpu@{digest}")
    config = config_of(items, "demo-millrace-decode")
    assert config["cache_dir"] == "/var/cache/millrace/abababababab"


# ---------------------------------------------------------------------------------------------------- roll-outs


@pytest.mark.parametrize("name", EVERYTHING)
def test_rollout_may_take_as_long_as_the_slowest_start(name: str) -> None:
    """Routers are ready when a pair of workers is. Kubernetes' own limit of 600 s would call the install failed."""
    items = rendered(name)
    startups = [
        container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"]
        for where, spec in pods(items)
        for container in spec["containers"]
        if container["name"] == "worker" and "startupProbe" in container
    ]
    assert startups
    router = named(items, "Deployment", "demo-millrace-router")
    assert router["spec"]["progressDeadlineSeconds"] >= max(startups) + 600
    for item in of_kind(items, "Deployment"):
        if item is not router:
            assert item["spec"]["progressDeadlineSeconds"] >= 600 + min(startups)


@pytest.mark.parametrize("name", EVERYTHING)
def test_grace_covers_everything_that_a_drain_waits_for(name: str) -> None:
    """preStop, running work, pages that others still read, ranks and servers."""
    items = rendered(name)
    for where, spec in pods(items):
        main = next((c for c in spec["containers"] if c["name"] in ("router", "worker")), None)
        if main is None or "readinessProbe" not in main:
            continue
        pause = int(main["lifecycle"]["preStop"]["exec"]["command"][-1])
        config = config_of(items, where.split("/")[1])
        if main["name"] == "router":
            timeouts = RouterConfig.model_validate(config).timeouts
            needed = pause + timeouts.drain
        else:
            times = WorkerConfig.model_validate(config).timeouts
            needed = pause + times.drain + times.lease + 5 + 1  # frontend.STOP_GRACE_S, and the server's own second
        assert spec["terminationGracePeriodSeconds"] >= needed, where


def test_new_version_runs_beside_the_old_one() -> None:
    items = rendered("next")
    old, new = (named(items, "Deployment", f"demo-millrace-decode{suffix}") for suffix in ("", "-b"))
    assert "millrace/revision" not in old["spec"]["template"]["metadata"]["labels"]
    assert new["spec"]["template"]["metadata"]["labels"]["millrace/revision"] == "b"
    assert "millrace/revision" not in json.dumps(new["spec"]["selector"]), "a revision may be given later"
    service = named(items, "Service", "demo-millrace-decode-b")
    assert service["metadata"]["labels"]["millrace/revision"] == "b", "EndpointSlices copy it from there"
    assert new["spec"]["template"]["spec"]["containers"][0]["image"].endswith("millrace-worker:0.2.0-cpu")
    config = config_of(items, "demo-millrace-decode-b")
    assert (config["model"], config["limits"]["page_size"]) == ("/opt/b", 32)
    assert config["cache_dir"] == "/var/cache/millrace/0.2.0-cpu"


# ---------------------------------------------------------------------------------------------------- nodes that die


@pytest.mark.parametrize("name", presets())
def test_workers_of_one_pod_are_replaced_when_their_node_dies(name: str) -> None:
    """A StatefulSet waits for its dead pod until somebody deletes it by force; a Deployment makes another."""
    assert {item["kind"] for item in of_kind(rendered(name), *WORKLOADS)} == {"Deployment"}


def test_budgets_are_there_where_more_than_one_pod_can_be() -> None:
    def budgets(name: str, *more: str) -> set[str]:
        found = of_kind(rendered(name, *more), "PodDisruptionBudget")
        assert all(item["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for item in found)
        return {item["metadata"]["name"] for item in found}

    assert budgets("cpu-tiny") == set()
    assert budgets("cpu-tiny", "router.replicas=2") == {"demo-millrace-router"}
    assert budgets("hpa") == {f"demo-millrace-{part}" for part in ("router", "prefill", "decode")}
    assert budgets("h200-4p-9d") == {f"demo-millrace-{part}" for part in ("router", "prefill", "decode")}


# ---------------------------------------------------------------------------------------------------- jobs


@pytest.mark.parametrize("change", ["images.router.tag=v9", "logLevel=DEBUG", "model.revision=other"])
def test_job_of_another_template_has_another_name(change: str) -> None:
    """It cannot be changed (test_crds.py has the next version of the chart)."""

    def job(items: list[Object]) -> tuple[str, str]:
        (found,) = of_kind(items, "Job")
        return found["metadata"]["name"], json.dumps(found["spec"], sort_keys=True)

    before, after = job(rendered("hf")), job(rendered("hf", change))
    assert [mine == other for mine, other in zip(before, after, strict=True)] == [change == "logLevel=DEBUG"] * 2


def test_job_goes_when_it_has_ended_and_its_pods_are_nobody_elses() -> None:
    items = rendered("hf")
    (job,) = of_kind(items, "Job")
    assert job["spec"]["ttlSecondsAfterFinished"] > 0
    labels = job["spec"]["template"]["metadata"]["labels"]
    for item in of_kind(items, "Service", "PodDisruptionBudget"):
        selector = item["spec"]["selector"]
        selector = selector.get("matchLabels", selector)
        assert not selector.items() <= labels.items(), item["metadata"]["name"]


def test_two_models_are_downloaded_by_two_jobs() -> None:
    more = ("workers.decode.model.uri=a/next", "workers.decode.model.path=next")
    assert len(of_kind(rendered("hf", *more), "Job")) == 2
    assert len(of_kind(rendered("hf"), "Job")) == 1


def test_a_folder_keeps_the_model_that_was_downloaded(tmp_path: Path) -> None:
    """Who asks for another revision is told. Pods would read the old files as the new ones."""
    (container,) = of_kind(rendered("hf"), "Job")[0]["spec"]["template"]["spec"]["containers"]
    hf, folder = tmp_path / "hf", tmp_path / "models"
    hf.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n')
    hf.chmod(0o755)

    def download(revision: str) -> tuple[int, str, int]:
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "URI": "a/b", "REVISION": revision, "FOLDER": str(folder)}
        done = subprocess.run(container["command"], env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, len((tmp_path / "calls").read_text().splitlines())

    told = f"{folder} has a/b at v1: give another model.path for a/b"
    assert [download("v1"), download("v1")] == [(0, "", 1)] * 2
    assert [download("v2"), download("")] == [(1, f"{told} at v2\n", 1), (1, f"{told}\n", 1)]
    (folder / ".millrace-complete").write_text("")
    assert download("v2") == (0, "", 1), "nobody knows"


def test_caches_are_warmed_before_workers_hold_the_gpus() -> None:
    items = rendered("warm")
    jobs = of_kind(items, "Job")
    assert [job["metadata"]["name"] for job in jobs] == ["demo-millrace-decode-warm", "demo-millrace-prefill-warm"]
    weights = [int(job["metadata"]["annotations"]["helm.sh/hook-weight"]) for job in jobs]
    assert len(set(weights)) == len(weights), "one after the other: each needs the GPUs of a worker"
    for job in jobs:
        assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
        (container,) = job["spec"]["template"]["spec"]["containers"]
        pool = job["metadata"]["labels"]["millrace/pool"]
        (worker,) = (
            spec["containers"][0] for where, spec in pods(items) if where == f"Deployment/demo-millrace-{pool}"
        )
        assert container["resources"] == worker["resources"] and container["image"] == worker["image"]
        (config,) = (it for it in of_kind(items, "ConfigMap") if it["metadata"]["name"] == job["metadata"]["name"])
        assert yaml.safe_load(config["data"]["config.yaml"]) == warming(config_of(items, f"demo-millrace-{pool}"))
        assert int(config["metadata"]["annotations"]["helm.sh/hook-weight"]) < min(weights)
        assert container["command"][:2] == ["millrace", "compile"]
        startup = worker["startupProbe"]["failureThreshold"] * worker["startupProbe"]["periodSeconds"]
        assert job["spec"]["activeDeadlineSeconds"] == startup, "as long as a start may take"
        assert job["metadata"]["name"] not in {it["metadata"]["name"] for it in of_kind(items, *WORKLOADS)}


def warming(config: Object) -> Object:
    """A worker's configuration for a job that serves nobody."""
    limits = {key: value for key, value in config.get("limits", {}).items() if key != "disk_cache"}
    kept = {key: value for key, value in config.items() if key not in ("secret", "tls")}
    return {**kept, "host": "127.0.0.1", "limits": limits}


@pytest.mark.parametrize("more", [(), ("tls.mode=off",), DISK], ids=["", "plain", "disk"])
def test_what_runs_before_an_install_needs_nothing_of_the_release(more: tuple[str, ...]) -> None:
    """It would wait for Secrets and accounts that are made after it, until the install fails."""
    model = ("model.source=hf", "model.uri=a/b", "model.path=c", "model.claim=d")
    items = rendered("warm", *model, *more)
    later = {it["metadata"]["name"] for it in items if "helm.sh/hook" not in it["metadata"].get("annotations", {})}
    for job in of_kind(items, "Job"):
        assert not [name for name in later if json.dumps(name) in json.dumps(job["spec"])]
        if "warm" in job["metadata"]["name"]:
            (config,) = (it for it in of_kind(items, "ConfigMap") if it["metadata"]["name"] == job["metadata"]["name"])
            made = WorkerConfig.model_validate(yaml.safe_load(config["data"]["config.yaml"]))
            assert (made.secret, made.tls, made.limits.disk_cache) == (None, None, None), "what it does not mount"


def test_model_that_is_downloaded_is_there_before_caches_are_warmed() -> None:
    model = ("model.source=hf", "model.uri=a/b", "model.path=c", "model.claim=d")
    jobs = {
        job["metadata"]["labels"]["app.kubernetes.io/component"]: job
        for job in of_kind(rendered("warm", *model), "Job")
    }
    weights = {part: int(job["metadata"]["annotations"]["helm.sh/hook-weight"]) for part, job in jobs.items()}
    assert weights["download"] < weights["warm"]


# ---------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize(
    "name", [name for name in EVERYTHING if VARIANTS.get(name, (None,))[0] == GROUPS or "groups" in name]
)
def test_no_service_has_the_name_of_a_group(name: str) -> None:
    """LeaderWorkerSet makes a headless Service of the group's name, with addresses of pods that are not ready, but only
    if there is none of that name. Without it followers never find a leader, which is never ready without them.
    """
    items = rendered(name)
    groups = {item["metadata"]["name"] for item in of_kind(items, "LeaderWorkerSet")}
    services = {item["metadata"]["name"] for item in of_kind(items, "Service")}
    assert groups and not groups & services
    (test,) = (spec["containers"][0] for where, spec in pods(items) if where.startswith("Pod/"))
    hosts = {test["args"][i + 1].partition(".")[0] for i, word in enumerate(test["args"]) if word == "--decode"}
    assert hosts and hosts <= services
