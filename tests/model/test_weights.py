"""Every way in which a checkpoint can disagree with its config is refused by name; FP8 and sharded reads are exact."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from millrace_serve.model.checkpoint.shapes import check_headers
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.weights import INDEX_FILE, Checkpoint, CheckpointError, Part
from model.checkpoints import Tensors, variant
from torch import Tensor

CPU = torch.device("cpu")
GATE = "model.layers.1.mlp.gate.weight"
Q_B = "model.layers.0.self_attn.q_b_proj.weight"
SCALES = Q_B + "_scale_inv"
EXPERT = "model.layers.2.mlp.experts.3.down_proj.weight"


def load(path: Path, dims: ParallelDims | None = None, dtype: torch.dtype = torch.float32) -> DeepseekV3:
    return load_model(path, dims or ParallelDims(), CPU, dtype)


def _refused(path: Path, words: list[str]) -> None:
    """By a load, and by a look at the headers."""
    for read in (load, check_headers):
        with pytest.raises(CheckpointError) as error:
            read(path)
        assert all(word in str(error.value) for word in words), str(error.value)


def parameters(model: DeepseekV3) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, Tensor):
            found[prefix] = value
        elif isinstance(value, list):
            for index, item in enumerate(value):
                walk(f"{prefix}.{index}", item)
        elif type(value).__module__.startswith("millrace_serve.model") and hasattr(value, "__dict__"):
            for key, item in vars(value).items():
                walk(f"{prefix}.{key}", item)

    walk("model", model)
    return found


def assert_same_model(left: DeepseekV3, right: DeepseekV3) -> None:
    a, b = parameters(left), parameters(right)
    assert a.keys() == b.keys() and len(a) > 50
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_single_file_equals_shards(random_bf16: Path, tmp_path: Path) -> None:
    assert len(list(random_bf16.glob("*.safetensors"))) > 1
    single = variant(random_bf16, tmp_path / "single", lambda tensors: None)
    assert_same_model(load(single), load(random_bf16))


def test_fp8_load_equals_the_dequantised_checkpoint(random_fp8: Path, tmp_path: Path) -> None:
    def dequantise(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            scales, weight = tensors.pop(name), tensors[name.removesuffix("_scale_inv")]
            wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
            tensors[name.removesuffix("_scale_inv")] = weight.float() * wide

    plain = variant(random_fp8, tmp_path / "plain", dequantise)
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    assert_same_model(load(random_fp8), load(plain))
    assert_same_model(load(random_fp8, dtype=torch.bfloat16), load(plain, dtype=torch.bfloat16))


def test_ranks_hold_slices_of_the_whole(random_fp8: Path) -> None:
    """Shards that begin inside of an FP8 block included: the shared expert has 32 columns per rank."""
    whole = load(random_fp8).layers[1]
    parts = [load(random_fp8, ParallelDims(rank=rank, tp=4)).layers[1] for rank in range(4)]
    held = [layer.mlp.routed.held for layer in (*parts, whole)]
    for name in ("w13", "w2"):
        assert torch.equal(torch.cat([getattr(part, name) for part in held[:-1]]), getattr(held[-1], name))
    for name, dim in (("kv_b_proj", 0), ("q_b_proj", 0), ("o_proj", 1)):
        assert torch.equal(torch.cat([getattr(p.self_attn, name) for p in parts], dim), getattr(whole.self_attn, name))
    down = [p.mlp.shared_experts.down_proj for p in parts]
    assert down[0].shape == (256, 32) and torch.equal(torch.cat(down, 1), whole.mlp.shared_experts.down_proj)
    gate_up = torch.cat([p.mlp.shared_experts.gate_up_proj.view(2, 32, 256) for p in parts], 1)
    assert torch.equal(gate_up.flatten(0, 1), whole.mlp.shared_experts.gate_up_proj)


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        ("bf16", lambda t: t.pop(Q_B), [Q_B, "missing", "[768, 128]"]),
        ("bf16", lambda t: t.pop(EXPERT), [EXPERT, "missing", "[256, 128]"]),
        ("bf16", lambda t: t.update({Q_B: t[Q_B][:-1].clone()}), [Q_B, "[767, 128]", "[768, 128]"]),
        ("bf16", lambda t: t.update({EXPERT: t[EXPERT].T.contiguous()}), [EXPERT, "[128, 256]", "[256, 128]"]),
        ("bf16", lambda t: t.update({GATE: t[GATE].to(torch.int8)}), [GATE, "I8", "BF16"]),
        ("bf16", lambda t: t.update({Q_B: t[Q_B].to(torch.float8_e4m3fn)}), [Q_B, "F8_E4M3", "BF16"]),
        ("bf16", lambda t: t.update({"model.layers.4.extra.weight": torch.zeros(1)}), ["model.layers.4.extra.weight"]),
        ("bf16", lambda t: t.update({"model.norm.bias": torch.zeros(1)}), ["model.norm.bias", "does not describe"]),
        ("fp8", lambda t: t.pop(SCALES), [SCALES, "missing", "[6, 1]"]),
        ("fp8", lambda t: t.pop(EXPERT + "_scale_inv"), [EXPERT + "_scale_inv", "missing", "[2, 1]"]),
        ("fp8", lambda t: t.update({SCALES: torch.zeros(6, 2)}), [SCALES, "[6, 2]", "[6, 1]"]),
        ("fp8", lambda t: t.update({SCALES: torch.zeros(6, 1).bfloat16()}), [SCALES, "BF16", "F32"]),
    ],
)
def test_refusals_name_the_tensor(
    form: str, tmp_path: Path, change: Callable[[Tensors], object], words: list[str], request: pytest.FixtureRequest
) -> None:
    _refused(variant(request.getfixturevalue(f"random_{form}"), tmp_path / "bad", change), words)


def test_every_rank_notices_a_bad_expert_of_another(random_bf16: Path, tmp_path: Path) -> None:
    path = variant(random_bf16, tmp_path / "bad", lambda t: t.update({EXPERT: torch.zeros(2, 2)}))
    for rank in range(2):
        with pytest.raises(CheckpointError, match=EXPERT):
            load(path, ParallelDims(rank=rank, tp=2))


def test_mtp_layer_that_nobody_loads_may_be_missing(random_bf16: Path, tmp_path: Path) -> None:
    """Trainers leave it out, and its number in config.json."""
    layer = f"model.layers.{ModelConfig.load(random_bf16).num_hidden_layers}."

    def shorten(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(layer)]:
            del tensors[name]

    path = variant(random_bf16, tmp_path / "short", shorten)
    load_model(path, ParallelDims(), CPU, torch.float32, mtp=False)
    check_headers(path, mtp=False)
    _refused(path, [layer, "missing"])


def test_more_layers_in_the_config_than_in_the_file(random_bf16: Path, tmp_path: Path) -> None:
    path = variant(random_bf16, tmp_path / "more", lambda tensors: None)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.post_attention|model\.layers\.4"):
        load(path)


def test_unreadable_files(random_bf16: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(random_bf16 / "config.json", empty)
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        load(empty)
    (empty / "model.safetensors").write_bytes(b"\x10" * 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the header is cut off"):
        load(empty)
    for text in ("{", "{}", "[]", '{"weight_map": ["model.norm.weight"]}', '{"weight_map": {"model.norm.weight": 1}}'):
        (empty / INDEX_FILE).write_text(text)
        with pytest.raises(CheckpointError, match=r"malformed index|not JSON|expected an object"):
            load(empty)
    (empty / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        load(empty)


def test_dimension_that_does_not_divide_is_named(random_bf16: Path) -> None:
    with pytest.raises(ValueError, match=r"num_attention_heads=4 .* tp=3"):
        load(random_bf16, ParallelDims(tp=3))
    with pytest.raises(ValueError, match=r"n_routed_experts=16 .* tp \* dp=3"):
        load(random_bf16, ParallelDims(dp=3))


def test_rotary_buffers_of_old_checkpoints_are_ignored(random_bf16: Path, tmp_path: Path) -> None:
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(32)}
    load(variant(random_bf16, tmp_path / "old", lambda t: t.update(buffers)))


def test_slices_of_a_tensor(random_bf16: Path) -> None:
    ckpt = Checkpoint(random_bf16, ModelConfig.load(random_bf16), CPU, torch.float32)
    whole = ckpt.tensor(Q_B, (768, 128))
    assert torch.equal(ckpt.tensor(Q_B, (768, 128), Part(rows=(192, 384))), whole[192:384])
    assert torch.equal(ckpt.tensor(Q_B, (768, 128), Part(cols=(5, 77))), whole[:, 5:77])
    assert torch.equal(
        ckpt.tensor(Q_B, (768, 128), Part(rows=(1, 2), cols=(0, 1)), dtype=torch.bfloat16), whole[1:2, :1].bfloat16()
    )
