"""A bench of a preset runs the settings that the chart installs from it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from millrace_bench import node, pd, preset
from millrace_bench.preset import PresetError, load
from millrace_chart.config_schema import OWNED
from millrace_chart.render import GOLDEN, preset_file, presets, template
from millrace_common import config as configuration
from millrace_load import plots
from millrace_router.config import RouterConfig
from millrace_serve.worker.config import WorkerConfig
from millrace_testing.inside_cluster import InsideCluster

SIM = Path(__file__).with_name("sim_preset.yaml")
SCALED = {"dp", "tp", "device"}  # of the chart's own keys a bench keeps these


def installed(objects: str) -> dict[str, Any]:
    """The configuration files that the chart makes, by role."""
    found = {}
    for item in filter(None, yaml.safe_load_all(objects)):
        role = item["metadata"]["labels"].get("app.kubernetes.io/component")
        if item["kind"] == "ConfigMap" and "config.yaml" in item["data"]:
            found[role] = yaml.safe_load(item["data"]["config.yaml"])
    return found


def read(items: tuple[str, ...]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in items:
        configuration.override(values, item)
    return values


def test_what_only_a_cluster_has_is_what_the_chart_sets() -> None:
    assert {*preset.OF_CLUSTER["worker"]} == {*OWNED["workerConfig"]} - SCALED
    assert {*preset.OF_CLUSTER["router"]} == {*OWNED["routerConfig"]}


@pytest.mark.parametrize("name", presets())
def test_settings_are_those_of_the_installed_files(name: str) -> None:
    check(installed((GOLDEN / f"{name}.yaml").read_text()), golden(name))


@pytest.mark.helm
def test_preset_without_a_golden_file_is_rendered() -> None:
    check(installed(template((SIM,))), load(SIM))
    assert load(preset_file("h200-3p-1d")) == golden("h200-3p-1d")


def check(expected: dict[str, Any], found: preset.Preset) -> None:
    assert {pool.role for pool in found.pools} == expected.keys() - {"router"}
    for pool in found.pools:
        own = {key: value for key, value in expected[pool.role].items() if key not in preset.OF_CLUSTER["worker"]}
        assert read(pool.settings) == own and own
        WorkerConfig.model_validate({**read(pool.settings), "role": pool.role, "model": "/models/v3"})
    router = {key: value for key, value in expected["router"].items() if key not in preset.OF_CLUSTER["router"]}
    assert read(found.router_set) == router
    RouterConfig.model_validate({**router, "model": "/models/v3"})


def golden(name: str) -> preset.Preset:
    return load(GOLDEN / f"{name}.yaml")


def test_replicas_are_scaled_and_settings_are_not() -> None:
    whole, four = golden("h200-3p-1d"), golden("h200-3p-1d").scaled(4)
    assert [(pool.role, pool.replicas, pool.config["dp"]) for pool in four.pools] == [
        ("decode", 1, 1),
        ("prefill", 3, 1),
    ]
    for one, other in zip(whole.pools, four.pools, strict=True):
        assert {**one.config, "dp": 1} == other.config
    spec = four.spec((), model=Path("/models/v3"), gpus=4)
    firsts = [spec.settings(worker)[0] for worker in spec.workers()]
    assert sorted(firsts) == [f"first_gpu={gpu}" for gpu in range(4)]
    assert golden("h200-8gpu-unified").scaled(4).pools[0].config["dp"] == 4
    with pytest.raises(PresetError, match=r"3 prefill worker|1 decode worker.* of 32 GPUs cannot be scaled to 3"):
        whole.scaled(3)


def test_a_node_runs_the_unified_worker_of_a_preset(tmp_path: Path) -> None:
    settings = node.installed(GOLDEN / "h200-8gpu-unified.yaml", 4)
    assert "dp=4" in settings and 'goal="balanced"' in settings
    host = node.Host(4, 61, tmp_path, settings)
    for stage in node.loads(host):
        assert "goal=" in stage.command and "max_running" not in stage.command, stage.command
    with pytest.raises(PresetError, match=r"its pools are \['decode', 'prefill'\]; bench pd takes them"):
        node.installed(GOLDEN / "h200-3p-1d.yaml", 4)


def test_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PresetError, match="cannot read"):
        load(tmp_path / "absent.yaml")
    (tmp_path / "objects.yaml").write_text("kind: Secret\n")
    with pytest.raises(PresetError, match="0 pools of workers"):
        load(tmp_path / "objects.yaml")


@pytest.mark.helm
def test_preset_runs_under_a_load_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd, "LocalCluster", InsideCluster)
    options = "--engine sim --warmup 1 --think-time 0 --slo ttft=60 --changing 200/8@20 40/4x2@10 --every 1"
    record = json.loads(pd.run(pd.parsed(["--preset", str(SIM), *options.split()]), tmp_path).to_json())
    *segments, whole = record["results"]["rows"]
    assert record["results"]["failed"] == {} and {row["topology"] for row in (*segments, whole)} == {"preset"}
    assert [row["load"] for row in (*segments, whole)] == ["200 in, 8 out", "40 in, 4 out, 2 turns", "all"]
    due, met = (sum(second[key] for second in whole["timeline"]) for key in ("due", "met"))
    assert due == met == whole["requests"] == whole["completed"] and not whole["errors"]
    assert whole["watched"] and all(second["duties"] == {"prefill": 1, "decode": 1} for second in whole["watched"])
    plots.draw_changes([whole], tmp_path / "changes.svg")
    assert "prompt tokens that wait" in (tmp_path / "changes.svg").read_text()
