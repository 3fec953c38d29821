"""`millrace check` tells what a worker would find out when it starts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from millrace_bench.v3 import write_folder
from millrace_chart.render import template
from millrace_cli.check import check
from millrace_cli.errors import CommandError
from millrace_serve.engine.start.layouts import GPUS, Layout, choose, layouts
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.weights import INDEX_FILE
from millrace_serve.worker.config import WorkerConfig
from millrace_testing.checkpoint import write_checkpoint
from millrace_testing.int4 import write_int4
from millrace_testing.paths import ROOT, TINY
from safetensors.torch import load_file, save_file


@pytest.mark.helm
def test_the_values_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(ROOT / "models" / "generated" / "tiny-fp8", "H100", ["limits.max_model_len=2048"])
    printed = capsys.readouterr()
    assert "FP8 weights" in printed.err and "8 experts in 4 group(s)" in printed.err
    values = tmp_path / "values.yaml"
    values.write_text(printed.out)
    objects = [one for one in yaml.safe_load_all(template((values,))) if one]
    gpus = [
        container["resources"]["limits"]["nvidia.com/gpu"]
        for one in objects
        if one["kind"] == "Deployment"
        for container in one["spec"]["template"]["spec"]["containers"]
        if "nvidia.com/gpu" in container["resources"]["limits"]
    ]
    assert gpus == ["1", "1"], "a prefill and a decode worker"
    assert "max_model_len: 2048" in template((values,))


@pytest.mark.long
@pytest.mark.helm
def test_v3_on_gpus_of_80_gb_needs_a_group_of_two_nodes(tmp_path: Path) -> None:
    """As a command."""
    folder = write_folder(tmp_path / "v3", "v3", 61)
    code = "from millrace_cli.__main__ import main; main()"
    command = [sys.executable, "-c", code, "check", str(folder), "--gpu", "H100", "--set", "random_weights=true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    worker = yaml.safe_load(done.stdout)["workerDefaults"]
    assert (worker["dp"], worker["gpus"], worker["kind"], worker["size"]) == (16, 8, "lws", 2)
    assert "does not fit" in done.stderr
    values = tmp_path / "values.yaml"
    values.write_text(done.stdout)
    assert "kind: LeaderWorkerSet" in template((values,))


def test_layouts_are_those_that_a_worker_would_plan() -> None:
    model = ModelConfig.load(TINY)
    config = WorkerConfig.model_validate({"model": TINY, "role": "unified", "device": "cuda"})
    found = list(layouts(config.limits, config, model))
    assert {(one.tp, one.dp) for one in found} == {(1, 1), (1, 2), (2, 1), (1, 4), (1, 8)}, "2 heads, 8 experts"
    most = config.limits.max_running * config.limits.max_model_len  # no worker plans more than its sequences can use
    assert len(found) == 5 * len(GPUS) and all(one.tokens == most for one in found)
    huge = config.limits.model_copy(update={"max_model_len": 1 << 40})
    assert all(one.tokens == 0 and "max_model_len" in one.why for one in layouts(huge, config, model))


def test_experts_in_int4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are planned in FP8."""
    wide = tmp_path / "wide"
    wide.mkdir()
    write_checkpoint(wide)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, wide)
    folder = write_int4(tmp_path / "int4", wide)
    check(folder, "H200", [])
    assert "BF16 weights, its experts in INT4 (FP8 in a GPU's memory)" in capsys.readouterr().err
    config = WorkerConfig.model_validate({"model": folder, "role": "unified", "device": "cuda"})
    models = [ModelConfig.load(path).without_mtp() for path in (wide, folder)]
    plain, packed = (next(layouts(config.limits, config, model)).weights for model in models)
    params = 2 * 16 * 3 * 128 * 256  # of the routed experts of two layers
    assert plain - packed == 2 * params - (params + 4 * params // 128**2), "with the scales of blocks"


def test_the_fewest_gpus_then_the_most_kv() -> None:
    found = [Layout("H200", 1, 4, 9, 0, "no"), Layout("H200", 1, 8, 9, 100), Layout("H200", 8, 1, 9, 300)]
    assert choose(found, "H200") == found[1]
    assert choose([*found, Layout("H200", 4, 1, 9, 50)], "H200") == Layout("H200", 4, 1, 9, 50)
    assert choose(found, "H100") is None


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> Path:
    """models/tiny with another tensor of this name, or without it."""
    shutil.copytree(TINY, folder)
    index = folder / INDEX_FILE
    facts = json.loads(index.read_text())
    file = facts["weight_map"].pop(name, "more.safetensors")
    if tensor is not None:
        facts["weight_map"][name] = file
        weights = load_file(folder / file) if (folder / file).exists() else {}
        save_file({**weights, name: tensor}, folder / file)
    index.write_text(json.dumps(facts))
    return folder


def test_what_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    norm, name = "model.norm.weight", "model.layers.0.self_attn.o_proj.weight"
    refused = {
        "is missing": change(tmp_path / "a", norm, None),
        "expected [": change(tmp_path / "b", name, torch.zeros(3, 3)),
        "does not describe: extra": change(tmp_path / "c", "extra", torch.zeros(1)),
    }
    shutil.copytree(TINY, tmp_path / "d")
    config = json.loads((TINY / "config.json").read_text())
    (tmp_path / "d" / "config.json").write_text(json.dumps({**config, "model_type": "glm_moe_dsa"}))
    refused["sparse attention"] = tmp_path / "d"
    shutil.copytree(TINY, tmp_path / "e")
    (tmp_path / "e" / "tokenizer.json").unlink()
    refused["no usable tokenizer"] = tmp_path / "e"
    for words, folder in refused.items():
        with pytest.raises(CommandError, match=re.escape(words)) as error:
            check(folder, "H200", [])
        assert "\n" not in str(error.value)
