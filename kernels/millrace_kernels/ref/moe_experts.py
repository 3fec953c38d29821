from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, Fp8, Operand
from millrace_kernels.ref.fp8 import dequant_blocks
from millrace_kernels.ref.silu_mul import silu_mul


def moe_experts(
    x: Tensor | Operand,
    weights: Tensor,
    experts: Tensor,
    w13: Tensor | Fp8,
    w2: Tensor | Fp8,
    *,
    shared_expert: bool = False,
    num_experts: int = 0,
) -> Tensor:
    """FP8 experts are computed in FP32, and nothing is quantised on the way."""
    del num_experts
    rows = plain_rows(x)
    num_routed = (w13.data if isinstance(w13, Fp8) else w13).shape[0] - shared_expert
    if shared_expert:
        experts = F.pad(experts, (0, 1), value=num_routed)
        weights = F.pad(weights, (0, 1), value=1.0)
    order = experts.flatten().argsort(stable=True)  # choices sorted by expert
    counts = torch.bincount(experts.flatten() + 1, minlength=num_routed + shared_expert + 1).tolist()
    out = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    start = counts[0]  # choices that are not computed here
    for expert, count in enumerate(counts[1:]):
        if count:
            choices = order[start : start + count]
            tokens = choices // experts.shape[1]
            outputs = one_expert(rows[tokens], w13, w2, expert)
            out.index_add_(0, tokens, outputs.float() * weights.flatten()[choices].unsqueeze(1))
            start += count
    return out.to(rows.dtype)


moe_experts_fp8 = moe_experts_other = moe_experts  # the same op; the table distinguishes them


def plain_rows(x: Tensor | Operand) -> Tensor:
    """[T, D]"""
    if isinstance(x, Tensor):
        return x
    if x.plain is not None:
        return x.plain
    assert x.fp8 is not None, "an operand without any form"
    data, scales = x.fp8
    return (data.float() * scales.repeat_interleave(BLOCK, 1)[:, : data.shape[1]]).bfloat16()


def one_expert(x: Tensor, w13: Tensor | Fp8, w2: Tensor | Fp8, expert: int) -> Tensor:
    """[T, D] -> [T, D], for all tokens"""
    first, second = _weight(w13, expert), _weight(w2, expert)
    return F.linear(silu_mul(F.linear(x.to(first.dtype), first)), second)


def _weight(weight: Tensor | Fp8, expert: int) -> Tensor:
    if isinstance(weight, Fp8):
        return dequant_blocks(weight.data[expert], weight.scales[expert], torch.float32, 0, 0)
    return weight[expert]
