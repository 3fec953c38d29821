"""Bytes of the activations of a step, from the tensors that one layer holds at once: a plan before a measurement.

Weights in FP8 are assumed.
"""

from millrace_kernels.fp8 import BLOCK
from millrace_kernels.moe_experts import MAX_ROWS

from millrace_serve.model.config import ModelConfig
from millrace_serve.model.parallel import ParallelDims

BF16, FP32 = 2, 4
FP8 = 1 + FP32 / BLOCK  # with its scales
TILE_ROWS = 128  # of experts: the last tile of each is half empty
MOST_PEERS = 8  # replicas that exchange over peer memory; of more the kernels were never tried
SAMPLED = 4 * FP32  # logits, their order and what is left of them


def activation_bytes(model: ModelConfig, dims: ParallelDims, rows: int, prefix: int = 0, sampled: int = 0) -> int:
    """Of a rank, in the part of a layer, or in sampling, that needs most.

    Args: rows: of each replica. prefix: cached tokens whose keys are made at a time. sampled: sequences.
    """
    stream = 2 * rows * model.hidden_size * BF16  # residual, and what a part reads
    attention = _attention(model, model.num_attention_heads // dims.tp, rows, prefix)
    sampling = sampled * model.vocab_size * SAMPLED
    return int(stream + max(attention, _mlp(model, dims, rows), sampling))


def _attention(model: ModelConfig, heads: int, rows: int, prefix: int) -> float:
    """q, k, v and the output of all heads, and k and v of cached tokens beside them."""
    keys = heads * (2 * model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim) * BF16
    latents = (model.kv_lora_rank + model.qk_rope_head_dim) * BF16
    queries = heads * (model.qk_head_dim + model.v_head_dim) * BF16 + heads * FP32 + (model.q_lora_rank or 0) * FP8
    return rows * (queries + keys + latents) + prefix * (keys + latents)


def _mlp(model: ModelConfig, dims: ParallelDims, rows: int) -> float:
    """Of the experts or of a dense layer, their output included."""
    width = model.moe_intermediate_size // (dims.tp if dims.expert_tp else 1)
    held, choices = model.n_routed_experts // dims.ep_size + 1, model.num_experts_per_tok + 1
    replicas = dims.dp if dims.dp <= MOST_PEERS else 1  # DeepEP counts rows; other exchanges have room for all
    chosen = min(rows * replicas * min(choices, held), MAX_ROWS)
    chosen += min(chosen, held) * TILE_ROWS
    products = max(model.hidden_size * FP8 + 2 * width * BF16, model.hidden_size * BF16) + width * FP8
    dense = rows * (model.intermediate_size // (dims.dense_tp or dims.tp)) * (2 * BF16 + FP8)
    return rows * model.hidden_size * BF16 + max(chosen * products, dense if model.first_k_dense_replace else 0)
