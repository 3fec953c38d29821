"""A DeepSeek-V3 with random weights in the published layout, where a test needs other dimensions than models/tiny has.

Four heads and 16 experts (so tp = 4), YaRN, and matrices with partial FP8 blocks. There is no tokenizer.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from millrace_serve.model.checkpoint.shard_writer import write_json, write_shards
from millrace_serve.model.config import CONFIG_FILE
from torch import Tensor

MAX_SHARD_BYTES = 8 << 20  # several shards
SHARPNESS = 1.4  # of queries and of keys: attention picks a few positions, as a trained model's does
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_size": 256,
    "intermediate_size": 512,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 128,
    "n_group": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 1280,
}


def write_checkpoint(folder: Path) -> None:
    """config.json and BF16 shards; the same weights on every run."""
    write_json(folder / CONFIG_FILE, CONFIG)
    write_shards(folder, _random_weights().items(), MAX_SHARD_BYTES)


def _random_weights() -> dict[str, Tensor]:
    """BF16, and float32 for the correction bias. A matrix keeps the variance of its input, but for its gain."""
    rng = torch.Generator().manual_seed(20250117)
    weights: dict[str, Tensor] = {}
    for name, shape, gain in _layout():
        noise = torch.randn(shape, generator=rng)
        if name.endswith("e_score_correction_bias"):
            weights[name] = 0.05 * noise
        else:
            values = gain * shape[1] ** -0.5 * noise if len(shape) == 2 else 1 + 0.1 * noise
            weights[name] = values.bfloat16()
    mtp = f"model.layers.{CONFIG['num_hidden_layers']}"
    weights[f"{mtp}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{mtp}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    return weights


def _layout() -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Public name, shape and gain of every tensor that is no copy."""
    vocab, hidden, layers = CONFIG["vocab_size"], CONFIG["hidden_size"], CONFIG["num_hidden_layers"]
    yield "model.embed_tokens.weight", (vocab, hidden), hidden**0.5
    yield "model.norm.weight", (hidden,), 1
    yield "lm_head.weight", (vocab, hidden), 4
    for layer in range(layers + 1):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,), 1
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,), 1
        yield from _attention(f"{prefix}.self_attn")
        yield from _mlp(f"{prefix}.mlp", CONFIG["intermediate_size"]) if layer == 0 else _moe(f"{prefix}.mlp")
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield f"model.layers.{layers}.{norm}.weight", (hidden,), 1
    yield f"model.layers.{layers}.eh_proj.weight", (hidden, 2 * hidden), 1


def _attention(prefix: str) -> Iterator[tuple[str, tuple[int, ...], float]]:
    hidden, heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
    q_rank, latent = CONFIG["q_lora_rank"], CONFIG["kv_lora_rank"]
    nope, rope, v_dim = CONFIG["qk_nope_head_dim"], CONFIG["qk_rope_head_dim"], CONFIG["v_head_dim"]
    yield f"{prefix}.q_a_proj.weight", (q_rank, hidden), 1
    yield f"{prefix}.q_a_layernorm.weight", (q_rank,), 1
    yield f"{prefix}.q_b_proj.weight", (heads * (nope + rope), q_rank), SHARPNESS
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (latent + rope, hidden), SHARPNESS
    yield f"{prefix}.kv_a_layernorm.weight", (latent,), 1
    yield f"{prefix}.kv_b_proj.weight", (heads * (nope + v_dim), latent), SHARPNESS
    yield f"{prefix}.o_proj.weight", (hidden, heads * v_dim), 1


def _moe(prefix: str) -> Iterator[tuple[str, tuple[int, ...], float]]:
    experts, intermediate = CONFIG["n_routed_experts"], CONFIG["moe_intermediate_size"]
    yield f"{prefix}.gate.weight", (experts, CONFIG["hidden_size"]), 1
    yield f"{prefix}.gate.e_score_correction_bias", (experts,), 1
    for part in (*(f"experts.{expert}" for expert in range(experts)), "shared_experts"):
        yield from _mlp(f"{prefix}.{part}", intermediate)


def _mlp(prefix: str, intermediate: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    hidden = CONFIG["hidden_size"]
    yield f"{prefix}.gate_proj.weight", (intermediate, hidden), 1.5
    yield f"{prefix}.up_proj.weight", (intermediate, hidden), 1.5
    yield f"{prefix}.down_proj.weight", (hidden, intermediate), 1
