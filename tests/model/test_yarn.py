"""Tables and scales against transformers' rotary embedding and a hand-computed case."""

import math
from typing import Any

import pytest
import torch
from millrace_serve.model.config import ModelConfig, RopeScaling
from millrace_serve.model.yarn import BEHIND, inverse_frequencies, rope_tables, softmax_scale
from millrace_testing.checkpoint import CONFIG
from millrace_testing.tolerances import ROTARY_TOLERANCE, assert_close
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

YARN = CONFIG["rope_scaling"]


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        YARN,
        {**YARN, "factor": 40, "original_max_position_embeddings": 100},
        {**YARN, "mscale": 0.5, "beta_slow": 3},
    ],
)
def test_tables_equal_transformers(scaling: dict[str, Any] | None) -> None:
    raw = {**CONFIG, "rope_scaling": scaling}
    cos, sin = rope_tables(ModelConfig.parse(raw), torch.device("cpu"))
    theirs = DeepseekV3RotaryEmbedding(DeepseekV3Config(**raw))
    expected = theirs(torch.zeros(1), torch.arange(raw["max_position_embeddings"])[None])
    assert cos.shape == (4096 + BEHIND, 32) and cos.dtype == torch.float32
    for ours, table in zip((cos, sin), expected, strict=True):
        assert_close(ours[:4096], table[0, :, :32], ROTARY_TOLERANCE)


def test_tables_of_a_model_without_memory() -> None:
    ours, real = (rope_tables(ModelConfig.parse(CONFIG), torch.device(kind)) for kind in ("meta", "cpu"))
    assert all(table.is_meta for table in ours)
    assert [(table.shape, table.dtype) for table in ours] == [(table.shape, table.dtype) for table in real]


def test_fast_dimensions_are_kept_and_slow_ones_are_interpolated() -> None:
    plain = inverse_frequencies(64, 10000.0, None)
    scaled = inverse_frequencies(64, 10000.0, RopeScaling(factor=4, original_max_position_embeddings=1024))
    assert torch.equal(scaled[:5], plain[:5])  # over 32 turns within the original context
    assert_close(scaled[-8:], plain[-8:] / 4)  # less than one turn
    assert ((scaled <= plain) & (scaled >= plain / 4)).all()


def test_softmax_scale() -> None:
    plain = 192**-0.5
    assert softmax_scale(ModelConfig.parse({**CONFIG, "rope_scaling": None})) == plain
    assert softmax_scale(ModelConfig.parse({**CONFIG, "rope_scaling": {**YARN, "mscale_all_dim": 0}})) == plain
    expected = plain * (0.1 * math.log(4) + 1) ** 2
    assert softmax_scale(ModelConfig.parse(CONFIG)) == pytest.approx(expected)
