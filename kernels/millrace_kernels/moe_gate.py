"""DeepSeek-V3's router (paper eq. 12-16): sigmoid scores, bias only for the choice, experts limited to the best groups.

s = sigmoid(logits)    group score = sum of its two largest (s + bias)    top-k of s + bias within the topk_group groups
weight = s / sum(s chosen)  (norm_topk_prob)  * routed_scaling_factor
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from millrace_kernels.backend import implementation


class GateRule(NamedTuple):
    """The names of config.json; `top_k` is num_experts_per_tok."""

    n_group: int
    topk_group: int
    top_k: int
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0


def gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    """logits = x weight^T, exact products summed in FP32: a rounding difference here changes which experts run.

    Args:
        x: [T, D]; weight: [E, D]; each bfloat16 or float32.
    Returns:
        float32 [T, E], or [P, T, E] in parts of K that moe_gate adds.
    """
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    return implementation("moe_gate.gate_logits", x.device, x.shape[0])(x, weight)


def moe_gate(logits: Tensor, bias: Tensor, rule: GateRule, num_tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits float32 [T, E], bias float32 [E] -> weights float32 [T, K], experts int32 [T, K].

    Args:
        logits: contiguous; or [P, T, E], of which the sum over P counts.
        num_tokens: int32 [1] where the logits are; rows from num_tokens[0] on are the padding of a CUDA graph and
            choose nothing: expert -1, weight 0. None: every row is a token.
    Notes:
        Ties between groups and between experts go to the lower index. Experts come in falling order of s + bias.
        E is a multiple of n_group, a group has at least two experts and topk_group groups have at least top_k.
    """
    rows, num_experts = logits.shape[-2:]
    assert num_experts == bias.shape[0] and num_experts % rule.n_group == 0, (logits.shape, bias.shape, rule)
    assert 2 * rule.n_group <= num_experts, (num_experts, rule)
    assert rule.top_k * rule.n_group <= rule.topk_group * num_experts, (num_experts, rule)
    assert num_tokens is None or num_tokens.dtype == torch.int32, num_tokens
    return implementation("moe_gate.moe_gate", logits.device, rows)(logits, bias, rule, num_tokens)
