"""The size of a rank's weights is known before they are read, and it is the size that they have."""

import json
from pathlib import Path

import pytest
import torch
from millrace_serve.model.checkpoint.random_weights import RandomWeights
from millrace_serve.model.checkpoint.shapes import tensor_bytes, weight_bytes
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import FP8, PLAIN, Kept
from millrace_testing.paths import TINY

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_size_is_exact(dtype: torch.dtype) -> None:
    config = ModelConfig.load(TINY)
    model = load_model(TINY, ParallelDims(), CPU, dtype)
    assert weight_bytes(config, ParallelDims(), dtype, PLAIN) == tensor_bytes(model)


@pytest.mark.parametrize("kept", [PLAIN, FP8])
@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(rank=1, tp=2),
        ParallelDims(rank=1, tp=2, expert_tp=True),
        ParallelDims(rank=1, dp=2),
        ParallelDims(rank=1, dp=2, redundant_experts=1),
    ],
)
def test_size_of_a_shard_is_exact(dims: ParallelDims, kept: Kept) -> None:
    config = ModelConfig.load(TINY)
    model = DeepseekV3(RandomWeights(CPU, torch.bfloat16, kept), config, dims)
    size = weight_bytes(config, dims, torch.bfloat16, kept)
    assert size == tensor_bytes(model) < weight_bytes(config, ParallelDims(), torch.bfloat16, kept)


def test_views_of_one_memory_count_once() -> None:
    table = torch.zeros(10, 10)
    assert tensor_bytes([table, (table[1:], table.T), [table.clone()]]) == 800


def test_config_that_does_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        weight_bytes(ModelConfig.load(Path(TINY)), ParallelDims(tp=3), torch.bfloat16, PLAIN)
    odd = ModelConfig.parse({**json.loads((TINY / "config.json").read_text()), "moe_intermediate_size": 63})
    with pytest.raises(ValueError, match="moe_intermediate_size=63 is not a multiple of tp=2"):
        weight_bytes(odd, ParallelDims(tp=2, expert_tp=True), torch.bfloat16, PLAIN)
