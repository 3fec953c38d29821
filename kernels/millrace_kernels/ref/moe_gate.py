from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.moe_gate import GateRule


def gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.float(), weight.float())


def moe_gate(logits: Tensor, bias: Tensor, rule: GateRule, num_tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
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
    if num_tokens is None:
        return weights, experts
    padding = (torch.arange(logits.shape[0], device=logits.device) >= num_tokens).unsqueeze(1)
    return weights.masked_fill(padding, 0.0), experts.masked_fill(padding, -1)


def _largest(x: Tensor, num: int) -> Tensor:
    """Indices of the `num` largest of each row, lower index first among equals; topk promises no order of equals."""
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :num]
