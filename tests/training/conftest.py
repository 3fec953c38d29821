from pathlib import Path

import numpy as np
import pytest
import torch
from millrace_training.config import ModelConfig
from millrace_training.model import DeepseekV3
from millrace_training.recipe import Mixture, Phase, Recipe, Stage

torch.set_num_threads(1)

MICRO = ModelConfig(
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    max_position_embeddings=256,
)
SHORT = Mixture(text=0.4, retrieval=0.2, short=0.4, copy=0.2, addition=0.4, sort=0.1, chat=0.2, known=0.1, copy_pool=8)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    """Plain text of four tokens that repeat: learnable in a few steps."""
    directory = tmp_path_factory.mktemp("data")
    tokens = np.tile(np.array([300, 400, 500, 600], np.uint16), 500)
    np.savez_compressed(directory / "train.npz", tokens=tokens, starts=np.array([0, 400, 800]))
    return directory


@pytest.fixture
def micro_config() -> ModelConfig:
    return MICRO


@pytest.fixture
def micro_model() -> DeepseekV3:
    torch.manual_seed(0)
    return DeepseekV3(MICRO)


@pytest.fixture
def micro_recipe() -> Recipe:
    teach = Phase((Stage(12, 48, 4), Stage(6, 96, 2)), 1e-2, SHORT)
    polish = Phase((Stage(6, 48, 4),), 2e-3, SHORT)
    return Recipe((teach, polish), warmup_steps=3)
