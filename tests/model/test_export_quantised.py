"""The exporter of quantised checkpoints: the published choice of tensors, exact files, errors that name the tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from millrace_kernels.fp8 import dequant_blocks
from millrace_serve.model.checkpoint import export_quantised
from millrace_serve.model.checkpoint.export_quantised import QUANTISED, export, quantise
from millrace_serve.model.config import ModelConfig, ModelConfigError
from millrace_serve.model.weights import INDEX_FILE, CheckpointError
from millrace_testing.int4 import write_int4
from millrace_testing.paths import TINY
from model.checkpoints import Tensors, tensors_of, variant
from safetensors.torch import load_file

SCALE_SUFFIX = "_scale_inv"
Q_B = "model.layers.0.self_attn.q_b_proj.weight"
EXPERT = "model.layers.2.mlp.experts.3.down_proj.weight"

# Of the published DeepSeek-V3: name without the layer's number, and what it is stored as.
PUBLISHED = {
    "model.embed_tokens.weight": "BF16",
    "model.layers.0.self_attn.q_a_proj.weight": "F8_E4M3",
    "model.layers.0.self_attn.q_a_layernorm.weight": "BF16",
    "model.layers.0.self_attn.q_b_proj.weight": "F8_E4M3",
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": "F8_E4M3",
    "model.layers.0.self_attn.kv_a_layernorm.weight": "BF16",
    "model.layers.0.self_attn.kv_b_proj.weight": "F8_E4M3",
    "model.layers.0.self_attn.o_proj.weight": "F8_E4M3",
    "model.layers.0.mlp.gate_proj.weight": "F8_E4M3",
    "model.layers.0.mlp.up_proj.weight": "F8_E4M3",
    "model.layers.0.mlp.down_proj.weight": "F8_E4M3",
    "model.layers.0.input_layernorm.weight": "BF16",
    "model.layers.0.post_attention_layernorm.weight": "BF16",
    "model.layers.3.mlp.gate.weight": "BF16",
    "model.layers.3.mlp.gate.e_score_correction_bias": "F32",
    "model.layers.3.mlp.shared_experts.gate_proj.weight": "F8_E4M3",
    "model.layers.3.mlp.experts.255.down_proj.weight": "F8_E4M3",
    "model.norm.weight": "BF16",
    "lm_head.weight": "BF16",
    "model.layers.61.embed_tokens.weight": "BF16",
    "model.layers.61.enorm.weight": "BF16",
    "model.layers.61.hnorm.weight": "BF16",
    "model.layers.61.eh_proj.weight": "BF16",
    "model.layers.61.self_attn.o_proj.weight": "F8_E4M3",
    "model.layers.61.mlp.experts.0.up_proj.weight": "F8_E4M3",
    "model.layers.61.shared_head.norm.weight": "BF16",
    "model.layers.61.shared_head.head.weight": "BF16",
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In many shards."""
    target = tmp_path_factory.mktemp("fp8") / "exported"
    export(TINY, target, max_shard_bytes=1 << 20)
    return target


def test_choice_of_tensors_is_the_published_one() -> None:
    assert {name for name in PUBLISHED if QUANTISED.fullmatch(name)} == {
        name for name, dtype in PUBLISHED.items() if dtype == "F8_E4M3"
    }


def test_quantised_tensors_are_close_and_the_others_untouched(exported: Path) -> None:
    before, after = tensors_of(TINY), tensors_of(exported)
    quantised = {name for name in before if QUANTISED.fullmatch(name)}
    assert after.keys() == before.keys() | {name + SCALE_SUFFIX for name in quantised}
    for name, tensor in before.items():
        if name not in quantised:
            assert torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype
            continue
        scales = after[name + SCALE_SUFFIX]
        assert after[name].dtype == torch.float8_e4m3fn and after[name].shape == tensor.shape
        assert scales.dtype == torch.float32 and scales.shape == tuple(-(-size // 128) for size in tensor.shape)
        back = dequant_blocks(after[name], scales, torch.float32)
        step = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[1]] * 2**-9
        # Three bits of mantissa: half a step is 1/16 of a value, and half of 2^-9 of the scale near zero.
        assert ((back - tensor.float()).abs() <= tensor.float().abs() / 16 + step).all(), name


def test_partial_block_has_a_scale_of_its_own() -> None:
    """kv_a_proj_with_mqa has 512 + 64 rows."""
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    weight = torch.ones(576, 200, dtype=torch.bfloat16)
    weight[512:] = 1e-3
    parts = dict(quantise(name, weight, "fp8"))
    assert parts[name + SCALE_SUFFIX].shape == (5, 2)
    assert torch.allclose(parts[name + SCALE_SUFFIX][4], weight[-1, 0].float() / 448)
    assert torch.equal(dequant_blocks(parts[name], parts[name + SCALE_SUFFIX], torch.bfloat16), weight)


def test_forms_of_int8() -> None:
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    weight = torch.randn(200, 256, generator=torch.Generator().manual_seed(1))
    weight[:128, 128:] *= 100
    channels, blocks = (dict(quantise(name, weight.bfloat16(), form)) for form in ("int8", "int8-block"))
    assert channels[name + "_scale"].shape == (200, 1) and blocks[name + SCALE_SUFFIX].shape == (2, 2)
    for parts, scales in (
        (channels, channels[name + "_scale"]),
        (blocks, blocks[name + SCALE_SUFFIX].repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)),
    ):
        assert parts[name].dtype == torch.int8 and parts[name].shape == weight.shape
        assert ((parts[name] * scales - weight.bfloat16().float()).abs() <= scales * 0.501).all()


def test_files_of_the_export(exported: Path) -> None:
    shards = sorted(file.name for file in exported.glob("*.safetensors"))
    assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all((exported / shard).stat().st_size < 1.1 * (1 << 20) for shard in shards)
    index = json.loads((exported / INDEX_FILE).read_text())
    for shard in shards:
        held = {name for name, file in index["weight_map"].items() if file == shard}
        assert held == load_file(exported / shard).keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_of(exported).values())
    others = {file.name for file in TINY.iterdir() if file.suffix != ".safetensors"}
    assert {file.name for file in exported.iterdir()} == others | set(shards)
    assert (exported / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()


def test_config_is_the_published_one(exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    assert config == json.loads((TINY / "config.json").read_text())
    assert ModelConfig.load(exported).fp8_blocks


def test_source_without_an_index(exported: Path, tmp_path: Path) -> None:
    single = variant(TINY, tmp_path / "single", lambda tensors: None)
    export(single, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
    left, right = tensors_of(tmp_path / "out"), tensors_of(exported)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name].float(), right[name].float()) for name in left)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t[EXPERT].view(-1)[7:8].fill_(torch.nan), [EXPERT, "not finite"]),
        (lambda t: t[Q_B].view(-1)[7:8].fill_(-torch.inf), [Q_B, "not finite"]),
        (lambda t: t.update({Q_B: t[Q_B].to(torch.float8_e4m3fn)}), [Q_B, "float8_e4m3fn"]),
        (lambda t: t.update({EXPERT: t[EXPERT].flatten()}), [EXPERT, "[16384]"]),
    ],
)
def test_refusals_name_the_tensor_and_leave_nothing(
    tmp_path: Path, change: Callable[[Tensors], object], words: list[str]
) -> None:
    bad = variant(TINY, tmp_path / "bad", change)
    with pytest.raises(CheckpointError) as error:
        export(bad, tmp_path / "out")
    assert all(word in str(error.value) for word in words), str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_damaged_source_is_named(tmp_path: Path) -> None:
    source = shutil.copytree(TINY, tmp_path / "source")
    index = json.loads((source / INDEX_FILE).read_text())
    index["weight_map"]["model.layers.0.extra.weight"] = index["weight_map"][Q_B]
    (source / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.extra\.weight"):
        export(source, tmp_path / "out")
    shard = source / index["weight_map"][Q_B]
    shard.write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match=shard.name):
        export(source, tmp_path / "out")
    (source / INDEX_FILE).write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        export(source, tmp_path / "out")


def test_what_cannot_be_exported(exported: Path, tmp_path: Path) -> None:
    for source in (exported, write_int4(tmp_path / "int4", TINY)):
        with pytest.raises(ModelConfigError, match="already quantised"):
            export(source, tmp_path / "again")
    with pytest.raises(FileExistsError, match="remove it first"):
        export(TINY, exported)
    with pytest.raises(ModelConfigError, match="no such file"):
        export(tmp_path / "nowhere", tmp_path / "out")


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["export_quantised", str(TINY), str(tmp_path / "deep" / "out")])
    export_quantised.main()
    assert ModelConfig.load(tmp_path / "deep" / "out").fp8_blocks
    with pytest.raises(SystemExit) as stop:
        export_quantised.main()
    assert "export_quantised: " in str(stop.value) and "exists" in str(stop.value)
