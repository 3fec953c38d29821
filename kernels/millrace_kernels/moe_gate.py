"""DeepSeek-V3's router (paper eq. 12-16): sigmoid scores, bias only for the choice, experts limited to the best groups.

s = sigmoid(logits)    group score = sum of its two largest (s + bias)    top-k of s + bias within the topk_group groups
weight = s / sum(s chosen)  (norm_topk_prob)  * routed_scaling_factor
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
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
    run = implementation("moe_gate.gate_logits", x.device, x.shape[0])
    return run(x, weight) if run else reference_gate_logits(x, weight)


def reference_gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.float(), weight.float())


def moe_gate(
    logits: Tensor, bias: Tensor, rule: GateRule, num_tokens: Tensor | None = None, loads: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits float32 [T, E], bias float32 [E] -> weights float32 [T, K], experts int32 [T, K].

    Args:
        logits: contiguous; or [P, T, E], of which the sum over P counts.
        num_tokens: int32 [1] where the logits are; rows from num_tokens[0] on are the padding of a CUDA graph and
            choose nothing: expert -1, weight 0. None: every row is a token.
        loads: int32 [E], to which the number of rows that chose each expert is added.
    Notes:
        Ties between groups and between experts go to the lower index. Experts come in falling order of s + bias.
        E is a multiple of n_group, a group has at least two experts and topk_group groups have at least top_k.
    """
    rows, num_experts = logits.shape[-2:]
    assert num_experts == bias.shape[0] and num_experts % rule.n_group == 0, (logits.shape, bias.shape, rule)
    assert 2 * rule.n_group <= num_experts, (num_experts, rule)
    assert rule.top_k * rule.n_group <= rule.topk_group * num_experts, (num_experts, rule)
    assert num_tokens is None or num_tokens.dtype == torch.int32, num_tokens
    assert loads is None or (loads.dtype == torch.int32 and loads.shape == bias.shape), loads
    if run := implementation("moe_gate.moe_gate", logits.device, rows):
        return run(logits, bias, rule, num_tokens, loads)
    logits = logits.sum(0) if logits.dim() == 3 else logits
    scores = logits.sigmoid()
    choice = (scores + bias).unflatten(1, (rule.n_group, -1))  # [T, G, E/G]
    group_scores = choice.topk(2, dim=-1).values.sum(-1)  # [T, G]
    best = _largest(group_scores, rule.topk_group)  # [T, topk_group]
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    experts = _largest(choice.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(1), rule.top_k)  # [T, K]
    weights = scores.gather(1, experts)
    if rule.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights, experts = weights * rule.routed_scaling_factor, experts.int()
    if num_tokens is not None:
        padding = (torch.arange(rows, device=logits.device) >= num_tokens).unsqueeze(1)
        weights, experts = weights.masked_fill(padding, 0.0), experts.masked_fill(padding, -1)
    if loads is not None:
        chosen = experts.flatten()
        loads.index_add_(0, chosen.clamp(min=0), (chosen >= 0).int())
    return weights, experts


def _largest(x: Tensor, num: int) -> Tensor:
    """Indices of the `num` largest of each row, lower index first among equals; topk promises no order of equals."""
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :num]
