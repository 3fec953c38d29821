from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.ref.silu_mul import silu_mul


def moe_experts(x: Tensor, weights: Tensor, experts: Tensor, w13: Tensor, w2: Tensor, first_expert: int) -> Tensor:
    num_experts, top_k = w13.shape[0], experts.shape[1]
    local = (experts - first_expert).flatten()  # [T*K]
    held = ((local >= 0) & (local < num_experts)).nonzero().squeeze(1)
    order = held[local[held].argsort(stable=True)]  # assignments sorted by expert
    tokens = order // top_k
    counts = local[order].bincount(minlength=num_experts).tolist()
    permuted = x[tokens]  # [A, D]
    outputs = torch.empty_like(permuted)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            outputs[rows] = F.linear(silu_mul(F.linear(permuted[rows], w13[expert])), w2[expert])
            start += count
    outputs = outputs.float() * weights.flatten()[order].unsqueeze(1)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return out.index_add_(0, tokens, outputs).to(x.dtype)
