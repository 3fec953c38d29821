from __future__ import annotations

import torch
from torch import Tensor


def moe_gate(
    logits: Tensor,
    bias: Tensor,
    *,
    n_group: int,
    topk_group: int,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    choice = (scores + bias).unflatten(1, (n_group, -1))  # [T, G, E/G]
    group_scores = choice.topk(2, dim=-1).values.sum(-1)  # [T, G]
    best = _largest(group_scores, topk_group)  # [T, topk_group]
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    experts = _largest(choice.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(1), top_k)  # [T, K]
    weights = scores.gather(1, experts)
    if norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routed_scaling_factor, experts


def _largest(x: Tensor, num: int) -> Tensor:
    """Indices of the `num` largest of each row, lower index first among equals; topk promises no order of equals."""
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :num]
