"""`millrace check` tells what a worker would find out when it starts."""

import json
import math
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from millrace_bench import v3
from millrace_bench.v3 import write_folder
from millrace_chart.render import template
from millrace_cli.check import GPUS, check
from millrace_cli.errors import CommandError
from millrace_serve.engine.start.layouts import Layout, choose, layouts
from millrace_serve.model.checkpoint.random_weights import META, RandomWeights
from millrace_serve.model.checkpoint.shapes import Headers
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import PLAIN
from millrace_serve.model.weights import INDEX_FILE, Shape
from millrace_serve.worker.config import WorkerConfig
from millrace_testing.checkpoint import write_checkpoint
from millrace_testing.int4 import write_int4
from millrace_testing.paths import ROOT, TINY
from safetensors.torch import load_file, save_file


class Names(Headers):
    """Writes down the tensors that a model asks for, in the place of a checkpoint that has them."""

    def __init__(self) -> None:
        RandomWeights.__init__(self, META, torch.bfloat16, PLAIN)
        self.shapes: dict[str, Shape] = {}

    def claim(self, name: str, shape: Shape, *, optional: bool = False) -> None:
        self.shapes[name] = shape


@pytest.mark.helm
def test_values_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("gpu", yaml.safe_load((ROOT / "helm" / "millrace" / "files" / "gpus.yaml").read_text()))
def test_every_gpu_of_the_chart_is_known(gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(TINY, gpu, [])
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["workerDefaults"]["gpuModel"] == gpu
    assert gpu in printed.err


@pytest.mark.long
@pytest.mark.helm
def test_v3_on_gpus_of_80_gb_needs_a_group_of_two_nodes(tmp_path: Path) -> None:
    """As a command."""
    folder = write_folder(tmp_path / "v3", "v3", 61)
    code = "from millrace_cli.__main__ import main; main()"
    command = [sys.executable, "-c", code, "check", str(folder), "--gpu", "H100", "--set", "random_weights=true"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    worker = yaml.safe_load(done.stdout)["workerDefaults"]
    assert (worker["dp"], worker["gpus"], worker["kind"], worker["size"]) == (16, 8, "lws", 2)
    (row,) = [line.split() for line in done.stderr.splitlines() if line.split()[1:4] == ["1", "x", "8"]]
    assert row[5] == "no", "on eight H100s"
    values = tmp_path / "values.yaml"
    values.write_text(done.stdout)
    assert "kind: LeaderWorkerSet" in template((values,))


@pytest.mark.long
def test_checkpoint_of_v3s_size_is_checked_in_seconds(tmp_path: Path) -> None:
    """All headers of 671B parameters in FP8, in 163 files without data. As a command."""
    folder = write_headers(tmp_path / "v3", 163)
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) > 680e9
    code = "from millrace_cli.__main__ import main; main()"
    command = [sys.executable, "-c", code, "check", str(folder), "--gpu", "H200"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60, "of a processor"
    worker = yaml.safe_load(done.stdout)["workerDefaults"]
    assert (worker["tp"], worker["dp"], worker["gpus"]) == (1, 8, 8)
    assert "256 experts in 8 group(s), FP8 weights" in done.stderr


def write_headers(folder: Path, num_files: int) -> Path:
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, folder)
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    raw = {key: value for key, value in v3.V3.items() if key != "fp8_blocks"}
    raw |= {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_nextn_predict_layers": 1}
    raw |= {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(raw))
    names = Names()
    DeepseekV3(names, ModelConfig.load(folder), ParallelDims())
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in names.shapes.items():
        quantised = name.endswith("proj.weight") and "eh_proj" not in name
        tensors[name] = ("F8_E4M3" if quantised else "F32" if name.endswith("bias") else "BF16", shape)
        if quantised:
            tensors[f"{name}_scale_inv"] = ("F32", tuple(-(-size // 128) for size in shape))
    for number in range(num_files):
        write_file(folder / f"model-{number:05}.safetensors", dict(list(tensors.items())[number::num_files]))
    places = {name: f"model-{i % num_files:05}.safetensors" for i, name in enumerate(tensors)}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": places}))
    return folder


def write_file(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * {"F8_E4M3": 1, "BF16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def test_folder_without_a_chat_template_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(TINY, tmp_path / "a")
    check(tmp_path / "a", "H200", [])
    assert "no chat template" not in capsys.readouterr().err
    file = tmp_path / "a" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": None}))
    check(tmp_path / "a", "H200", [])
    assert "no chat template: chat needs the router's chat_template" in capsys.readouterr().err


def test_layouts_are_those_that_a_worker_would_plan() -> None:
    model = ModelConfig.load(TINY)
    config = WorkerConfig.model_validate({"model": TINY, "role": "unified", "device": "cuda"})
    found = list(layouts(config.limits, config, model, GPUS))
    assert {(one.tp, one.dp) for one in found} == {(1, 1), (1, 2), (2, 1), (1, 4), (1, 8)}, "2 heads, 8 experts"
    most = config.limits.max_running * config.limits.max_model_len  # no worker plans more than its sequences can use
    assert len(found) == 5 * len(GPUS) and all(one.tokens == most for one in found)
    huge = config.limits.model_copy(update={"max_model_len": 1 << 40})
    assert all(one.tokens == 0 and "max_model_len" in one.why for one in layouts(huge, config, model, GPUS))


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
    plain, packed = (next(layouts(config.limits, config, model, GPUS)).weights for model in models)
    params = 2 * 16 * 3 * 128 * 256  # of the routed experts of two layers
    assert plain - packed == 2 * params - (params + 4 * params // 128**2), "with the scales of blocks"


def test_fewest_gpus_then_the_most_kv() -> None:
    found = [Layout("H200", 1, 4, 9, 0, "no"), Layout("H200", 1, 8, 9, 100), Layout("H200", 8, 1, 9, 300)]
    assert choose(found, "H200") == found[1]
    assert choose([*found, Layout("H200", 4, 1, 9, 50)], "H200") == Layout("H200", 4, 1, 9, 50)
    assert choose(found, "H100") is None


def test_layout_that_is_asked_for_is_the_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    check(TINY, "H200", ["tp=2", "dp=2", "limits.max_running=7"])
    found = capsys.readouterr()
    worker = yaml.safe_load(found.out)["workerDefaults"]
    assert (worker["tp"], worker["dp"], worker["gpus"]) == (2, 2, 4)
    assert worker["config"].keys() == {"timeouts", "limits"}, "the chart writes tp and dp"
    assert "2 x 2" in found.err and "1 x 1" not in found.err
    with pytest.raises(CommandError, match="with tp x dp = 16 x 1: the ranks do not divide the model"):
        check(TINY, "H200", ["tp=16"])


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
    shutil.copytree(TINY, tmp_path / "f")
    (tmp_path / "f" / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(CommandError, match=r"^draft_tokens=1: .*f has no MTP layer"):
        check(tmp_path / "f", "H200", ["limits.draft_tokens=1"])
