"""Checkpoints in INT8: what is loaded, and products on the INT8 weights, on the references of the ops."""

import json
from pathlib import Path

import pytest
import torch
from millrace_kernels.fp8 import Fp8
from millrace_kernels.int8 import Int8
from millrace_serve.model.checkpoint.shapes import tensor_bytes, weight_bytes
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model
from millrace_serve.model.moe import Moe
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import kept_forms, plain, stack_rows
from millrace_serve.model.weights import Checkpoint, CheckpointError, Part
from millrace_testing.paths import TINY
from millrace_testing.tolerances import FP8_MODEL_TOLERANCE
from model.checkpoints import InForm, Tensors, variant
from model.harness import Driver, Seq, random_prompt

CPU = torch.device("cpu")
FORMS = ("int8", "int8-block")
GATE_UP = [("model.layers.1.mlp.experts.0.gate_proj.weight", "model.layers.1.mlp.experts.0.up_proj.weight")]


@pytest.fixture(scope="module")
def drawn(random_bf16: Path, in_form: InForm) -> dict[str, Path]:
    """Random weights with other shapes than the trained ones, by form."""
    return {form: in_form(random_bf16, form) for form in (*FORMS, "fp8")}


def load(path: Path, keep: bool, dtype: torch.dtype = torch.float32) -> DeepseekV3:
    return load_model(path, ParallelDims(), CPU, dtype, keep_quantised=keep)


@pytest.mark.parametrize("form", FORMS)
def test_products_on_int8_are_near_those_of_dequantised_weights(form: str, in_form: InForm) -> None:
    """Up to the rounding of activations."""
    dequantised, kept = (Driver(load(in_form(TINY, form), keep)) for keep in (False, True))
    prompt = random_prompt(200, 1000, 1)
    for length in (1, 200):
        expected, actual = (driver.step([(Seq(list(prompt)), length)]) for driver in (dequantised, kept))
        error = float(((actual - expected).norm(dim=1) / expected.norm(dim=1)).median())
        assert 0 < error <= FP8_MODEL_TOLERANCE


@pytest.mark.parametrize("form", FORMS)
def test_which_weights_stay_in_int8(form: str, drawn: dict[str, Path]) -> None:
    model = load(drawn[form], True)
    for layer in model.layers:
        attn, mlp = layer.self_attn, layer.mlp
        for matrix in (attn.q_kv_a_proj, attn.q_b_proj, attn.o_proj, attn.kv_b_proj):
            assert isinstance(matrix, Int8) and matrix.by_block is (form == "int8-block")
        assert isinstance(attn.w_uk, torch.Tensor)  # absorbed per head: no GEMM
        if isinstance(mlp, Moe):
            assert isinstance(mlp.routed.held.w13, Int8) and isinstance(mlp.routed.held.w2, Int8)
        else:
            assert isinstance(mlp.mlp.gate_up_proj, Int8) and isinstance(mlp.mlp.down_proj, Int8)
    assert isinstance(load(drawn[form], False).layers[1].self_attn.o_proj, torch.Tensor)
    wide = load_model(drawn[form], ParallelDims(), CPU, torch.bfloat16, keep_quantised=True, mtp=False)  # plain eh_proj
    assert weight_bytes(wide.config, ParallelDims(), torch.bfloat16, kept_forms(wide.config, True)) == tensor_bytes(
        wide
    )


@pytest.mark.parametrize("form", [*FORMS, "fp8"])
def test_parts_of_ranks(form: str, drawn: dict[str, Path]) -> None:
    """With scales by row every part stays quantised, with blocks those of whole blocks."""
    ckpt = Checkpoint(drawn[form], ModelConfig.load(drawn[form]), CPU, torch.float32, keep_quantised=True)
    kind = Fp8 if form == "fp8" else Int8
    name, shape = "model.layers.0.self_attn.q_b_proj.weight", (768, 128)
    whole = ckpt.tensor(name, shape)
    for part, stays in ((Part(rows=(128, 384)), True), (Part(rows=(64, 384)), False), (Part(cols=(0, 64)), False)):
        found = ckpt.matrix(name, shape, part)
        (r0, r1), (c0, c1) = part.of(shape)
        assert isinstance(found, kind if stays or form == "int8" else torch.Tensor)
        assert torch.equal(plain(found, torch.float32), whole[r0:r1, c0:c1])
    stack = ckpt.stack(GATE_UP, (128, 256), Part(rows=(0, 64)))
    gate, up = (ckpt.tensor(name, (128, 256), Part(rows=(0, 64))) for name in GATE_UP[0])
    one = kind(stack.data[0], stack.scales[0]) if isinstance(stack, kind) else stack[0]
    assert torch.equal(plain(one, torch.float32), torch.cat((gate, up)))
    mixed = stack_rows((ckpt.matrix(name, shape), torch.ones(3, 128)), torch.float32)
    assert isinstance(mixed, torch.Tensor) and torch.equal(mixed[:768], whole)


def test_compressed_tensors_are_channels(drawn: dict[str, Path], tmp_path: Path) -> None:
    """As llm-compressor writes them: another quantization_config and scales in BF16 over the same tensors."""

    def in_bf16(tensors: Tensors) -> None:
        tensors.update({name: t.bfloat16() for name, t in tensors.items() if name.endswith("_scale")})

    folder = variant(drawn["int8"], tmp_path / "compressed", in_bf16)
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "strategy": "channel"},
        "input_activations": {**scheme, "strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config))
    left, right = (load(path, True).layers[0].self_attn.o_proj for path in (folder, drawn["int8"]))
    assert isinstance(left, Int8) and isinstance(right, Int8) and torch.equal(left.data, right.data)
    assert left.scales.dtype == torch.float32 and torch.equal(left.scales, right.scales.bfloat16().float())


def test_missing_scales_are_named(drawn: dict[str, Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    folder = variant(drawn["int8"], tmp_path / "bad", lambda t: t.pop(f"{name}_scale"))
    with pytest.raises(CheckpointError, match=f"{name}_scale is missing"):
        load(folder, True)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"dtype I8.*quantization_config"):
        load(folder, True)
