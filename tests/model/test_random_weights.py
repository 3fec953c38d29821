import pytest
import torch
from millrace_bench import v3
from millrace_kernels.fp8 import Fp8, dequant_blocks
from millrace_serve.model.checkpoint.random_weights import RandomWeights
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import FP8, PLAIN, Kept, plain
from millrace_serve.model.weights import Part

CPU = torch.device("cpu")


@pytest.mark.parametrize("fp8", [False, True])
def test_matrices_keep_the_size_of_activations(fp8: bool) -> None:
    weights = RandomWeights(CPU, torch.float32, FP8 if fp8 else PLAIN)
    matrix = weights.matrix("any", (512, 256), Part(rows=(128, 256)))
    if fp8:
        assert isinstance(matrix, Fp8) and matrix.data.dtype is torch.float8_e4m3fn and matrix.scales.shape == (1, 2)
        matrix = dequant_blocks(*matrix, torch.float32)
    assert matrix.shape == (128, 256)
    assert float((matrix @ torch.ones(256)).std()) == pytest.approx(1.0, rel=0.3)


def test_stacks_parts_and_vectors() -> None:
    weights = RandomWeights(CPU, torch.bfloat16, FP8)
    stacked = weights.stack([("gate", "up")] * 3, (256, 384), Part(cols=(0, 128)))
    assert isinstance(stacked, Fp8) and stacked.data.shape == (3, 512, 128) and stacked.scales.shape == (3, 4, 1)
    assert torch.equal(weights.tensor("a.bias", (4,), dtype=torch.float32), torch.zeros(4))
    assert torch.equal(weights.tensor("norm.weight", (4,)), torch.ones(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("kept", [PLAIN, FP8])
def test_steps_and_prompts_have_the_same_weights(kept: Kept) -> None:
    config = ModelConfig(num_hidden_layers=1, **{**v3.V3, **v3.TINY})
    mla = DeepseekV3(RandomWeights(CPU, torch.bfloat16, kept), config, ParallelDims()).layers[0].self_attn
    assert torch.equal(torch.cat((mla.w_uk, mla.w_uv), 1).flatten(0, 1), plain(mla.kv_b_proj, torch.bfloat16))


def test_name_gives_the_same_weights_in_any_slot_and_order() -> None:
    weights = RandomWeights(CPU, torch.float32, PLAIN)
    first, other, again = (weights.matrix(name, (8, 8)) for name in ("w", "v", "w"))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(weights.stack([("v",), ("w",)], (8, 8)), torch.stack((other, first)))
