"""A bench of a preset runs the settings that the chart installs from it."""

from __future__ import annotations

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
from millrace_router.config import RouterConfig
from millrace_serve.worker.config import WorkerConfig

SIM = Path(__file__).with_name("sim_preset.yaml")
SCALED = {"dp", "tp", "device"}  # of the chart's own keys a bench keeps these


def installed(file: Path) -> dict[str, Any]:
    """The configuration files that the chart makes, by role."""
    found = {}
    for item in yaml.safe_load_all(template((file,))):
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


@pytest.mark.helm
@pytest.mark.parametrize("file", [SIM, *map(preset_file, presets())], ids=lambda file: file.stem)
def test_settings_are_those_of_the_installed_files(file: Path) -> None:
    expected, found = installed(file), load(file)
    assert {pool.role for pool in found.pools} == expected.keys() - {"router"}
    for pool in found.pools:
        own = {key: value for key, value in expected[pool.role].items() if key not in preset.OF_CLUSTER["worker"]}
        assert read(pool.settings) == own and own
        WorkerConfig.model_validate({**read(pool.settings), "role": pool.role, "model": "/models/v3"})
    router = {key: value for key, value in expected["router"].items() if key not in preset.OF_CLUSTER["router"]}
    assert read(found.router_set) == router
    RouterConfig.model_validate({**router, "model": "/models/v3"})


@pytest.mark.helm
@pytest.mark.parametrize("name", presets())
def test_a_golden_file_needs_no_helm(name: str) -> None:
    assert load(GOLDEN / f"{name}.yaml") == load(preset_file(name))


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
@pytest.mark.e2e
@pytest.mark.xdist_group("e2e")
def test_a_small_run(tmp_path: Path) -> None:
    options = ["--preset", str(SIM), "--engine", "sim", "--loads", "200/8@20", "--seconds", "0.3", "--warmup", "1"]
    args = pd.parsed([*options, "--slo", "ttft=60"])
    record = json.loads(pd.run(args, tmp_path).to_json())
    (row,) = record["results"]["rows"]
    assert record["results"]["failed"] == row["errors"] == {} and row["topology"] == "preset"
    assert row["completed"] == row["requests"] > 0
