"""Configurations and scripts of pods have versions: a pod of an older revision that starts again finds its own."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from millrace_chart.render import CHART, NAMESPACE, RELEASE, ROOT, Object, run
from millrace_testing import kube_store
from millrace_testing.charts import EVERYTHING, GIVEN, NO_DASHBOARDS, files_of, of_kind, pods, rendered
from millrace_testing.kube_upgrade import refused

pytestmark = pytest.mark.helm
LASTING = ("Deployment", "StatefulSet", "LeaderWorkerSet")  # their pods start again without Helm
WORKERS = ("demo-millrace-prefill", "demo-millrace-decode")
CHANGES = {
    "logLevel=DEBUG": {"demo-millrace-router", *WORKERS},
    "router.config.timeouts.silence=4": {"demo-millrace-router"},
    "workers.decode.config.timeouts.lease=31": {"demo-millrace-decode"},
    "workerDefaults.image.tag=v9": set(WORKERS),  # names the cache's folder
    "workers.decode.replicas=2": set(),
    "labels.team=b": set(),
}


def mounted(items: list[Object]) -> dict[str, str]:
    """The ConfigMap of the volume `config` by where it is mounted."""
    return {
        where: volume["configMap"]["name"]
        for where, spec in pods(of_kind(items, *LASTING))
        for volume in spec["volumes"]
        if volume["name"] == "config"
    }


@pytest.mark.parametrize("name", EVERYTHING)
def test_config_map_of_a_lasting_pod_is_immutable(name: str) -> None:
    items = rendered(name)
    found = {item["metadata"]["name"]: item for item in of_kind(items, "ConfigMap")}
    for where, config in mounted(items).items():
        item = found[config]
        assert item["immutable"] and re.fullmatch(rf"{where.split('/')[1]}-[0-9a-f]{{10}}", config), where
        assert len(config) <= 63, "a label of that length can hold it"
        hook = item["metadata"]["annotations"]["helm.sh/hook"]
        assert hook == "pre-install,pre-upgrade,pre-rollback", "Helm deletes no hook of an older revision"
    extra = {
        v["configMap"]["name"] for _, s in pods(of_kind(items, *LASTING)) for v in s["volumes"] if "configMap" in v
    }
    assert {it for it in extra & found.keys() if not found[it].get("immutable")} == set(), "every other one as well"


@pytest.mark.parametrize("change", CHANGES)
def test_config_map_has_another_name_if_its_files_differ(change: str) -> None:
    before, after = (rendered("cpu-tiny", GIVEN, *more) for more in ((), (change,)))
    names = [*WORKERS, "demo-millrace-router"]
    assert {it for it in names if files_of(before, it) != files_of(after, it)} == CHANGES[change]
    old, new = mounted(before), mounted(after)
    assert {where.split("/")[1] for where in old if old[where] != new[where]} == CHANGES[change]
    assert not list(refused(before, after))


@pytest.mark.long
def test_pod_of_an_older_revision_finds_its_files() -> None:
    """A real helm; what it leaves is what pods of any revision find when they start again."""
    seen: dict[str, Object] = {}
    with kube_store.serving() as store:

        def helm(command: str, *arguments: str) -> None:
            access = ("--kube-apiserver", store.url, "--kube-token", "any", "--namespace", NAMESPACE)
            run([command, RELEASE, *arguments, *access])
            found = {name: item["data"] for (kind, name), item in store.objects.items() if kind == "ConfigMap"}
            lasting = [it for (kind, _), it in store.objects.items() if kind in LASTING]
            seen.update({config: found[config] for config in mounted(lasting).values()})
            assert {name: found.get(name) for name in seen} == seen, command

        helm("install", str(CHART), "--set", NO_DASHBOARDS)
        first = dict(seen)
        helm("upgrade", str(CHART), "--set", f"{NO_DASHBOARDS},logLevel=DEBUG")
        assert len(seen) == 2 * len(first) == 6, "all of them changed"
        helm("rollback", "1")
        helm("uninstall")
        helm("install", str(CHART), "--set", NO_DASHBOARDS)
    assert len(seen) == 6


KUBECTL = """#!/usr/bin/env bash
echo "$*" >> calls
case "$*" in
  "get configmaps"*) cat configmaps ;;
  "get "*) cat workloads ;;
esac
"""


def test_guide_removes_only_config_maps_without_revision(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "how-to" / "upgrade.md").read_text()
    (block,) = (text for text in re.findall(r"```bash\n(.*?)```", guide, re.DOTALL) if "millrace/files" in text)
    pod = {"spec": {"volumes": [{"name": "config", "configMap": {"defaultMode": 420, "name": "millrace-decode-22"}}]}}
    items = [{"kind": "Deployment", "spec": {"template": pod}}, {"kind": "ControllerRevision", "data": pod}]
    (tmp_path / "configmaps").write_text("".join(f"configmap/millrace-decode-{i}\n" for i in ("11", "22", "2")))
    (tmp_path / "workloads").write_text(yaml.safe_dump({"kind": "List", "items": items}))
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-euc", block], cwd=tmp_path, env=environment, check=True)
    deleted = [it for it in (tmp_path / "calls").read_text().splitlines() if it.startswith("delete")]
    assert deleted == ["delete configmap/millrace-decode-11", "delete configmap/millrace-decode-2"]
