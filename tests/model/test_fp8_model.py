"""A model whose GEMMs run on the FP8 weights themselves, on the references of the ops."""

from pathlib import Path

import pytest
import torch
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import BLOCK, Fp8, dequant_blocks, quant_blocks
from millrace_serve.model.checkpoint.shapes import tensor_bytes, weight_bytes
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model
from millrace_serve.model.moe import Moe
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import FP8, PLAIN, kept_forms, runs_quantised, stack_rows
from millrace_testing.paths import TINY
from millrace_testing.tolerances import FP8_MODEL_TOLERANCE
from model.checkpoints import InForm
from model.harness import Driver, Seq, random_prompt

CPU = torch.device("cpu")


def load(path: Path, keep_quantised: bool, dims: ParallelDims | None = None) -> DeepseekV3:
    return load_model(path, dims or ParallelDims(), CPU, torch.float32, keep_quantised=keep_quantised)


def test_logits_are_those_of_the_dequantised_weights(in_form: InForm) -> None:
    """Exactly for few tokens, whose activations are not quantised; else up to that rounding."""
    plain, kept = (Driver(load(in_form(TINY, "fp8"), keep)) for keep in (False, True))
    prompt = random_prompt(200, 1000, 1)
    for length, limit in ((SMALL_TOKENS, 1e-4), (200, FP8_MODEL_TOLERANCE)):
        expected, actual = (driver.step([(Seq(list(prompt)), length)]) for driver in (plain, kept))
        assert float(((actual - expected).norm(dim=1) / expected.norm(dim=1)).median()) <= limit


def test_which_weights_stay_in_fp8(random_fp8: Path, random_bf16: Path) -> None:
    model = load(random_fp8, keep_quantised=True)
    for layer in model.layers:
        attn, mlp = layer.self_attn, layer.mlp
        assert isinstance(attn.q_b_proj, Fp8) and isinstance(attn.o_proj, Fp8) and isinstance(attn.kv_b_proj, Fp8)
        assert isinstance(attn.w_uk, torch.Tensor)  # absorbed per head: no GEMM
        for plain, quantised in ((attn.w_uk, attn.w_uk_fp8), (attn.w_uv, attn.w_uv_fp8)):
            assert quantised.data.untyped_storage().data_ptr() == attn.kv_b_proj.data.untyped_storage().data_ptr()
            widened = quantised.data.float() * quantised.scales.repeat_interleave(BLOCK, 1)[:, None]
            assert torch.equal(widened, plain)
        if isinstance(mlp, Moe):
            assert mlp.routed.fuses_shared and mlp.shared_experts is None
            w13 = mlp.routed.held.w13
            assert isinstance(w13, Fp8) and w13.data.shape[0] == model.config.n_routed_experts + 1
    plain = load(random_bf16, keep_quantised=True).layers[1].self_attn
    assert not isinstance(plain.o_proj, Fp8) and plain.w_uk_fp8 is plain.w_uv_fp8 is None
    assert not isinstance(load(random_fp8, keep_quantised=False).layers[1].self_attn.o_proj, Fp8)


def test_rows_on_top_of_each_other() -> None:
    matrices = [torch.randn(rows, 256) for rows in (256, 72)]
    parts = [quant_blocks(matrix) for matrix in matrices]
    stacked = stack_rows(parts, torch.float32)
    assert isinstance(stacked, Fp8) and stacked.data.shape == (328, 256) and stacked.scales.shape == (3, 2)
    plain = torch.cat([dequant_blocks(*part, torch.float32) for part in parts])
    assert torch.equal(dequant_blocks(*stacked, torch.float32), plain)
    turned = stack_rows(parts[::-1], torch.float32)  # the second would begin inside of a block
    assert isinstance(turned, torch.Tensor) and torch.equal(turned, torch.cat((plain[256:], plain[:256])))
    mixed = stack_rows((parts[0], matrices[1]), torch.float32)
    assert isinstance(mixed, torch.Tensor) and torch.equal(mixed[256:], matrices[1])


def test_fp8_weights_stay_where_kernels_can_run_on_them(random_fp8: Path, random_bf16: Path) -> None:
    """Those of GPUs give BF16: a worker with dtype=float32 runs on dequantised weights."""
    fp8, gpu = ModelConfig.load(random_fp8), torch.device("cuda")
    assert runs_quantised(gpu, torch.bfloat16)
    assert not runs_quantised(gpu, torch.float32) and not runs_quantised(CPU, torch.bfloat16)
    assert kept_forms(fp8, True) == FP8 and kept_forms(ModelConfig.load(random_bf16), True) == PLAIN


@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(rank=1, tp=2), ParallelDims(rank=2, tp=4)])
def test_plan_of_memory_knows_which_parts_stay(dims: ParallelDims, random_fp8: Path) -> None:
    """Parts that are not whole blocks do not."""
    model = load(random_fp8, keep_quantised=True, dims=dims)
    assert weight_bytes(model.config, dims, torch.float32, FP8) == tensor_bytes(model)
