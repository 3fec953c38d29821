"""Experts and choices of tokens, for tests and benches."""

import torch
from torch import Tensor

from millrace_kernels.backend import forced
from millrace_kernels.fp8 import Fp8, quant_blocks
from millrace_kernels.moe_gate import GateRule, moe_gate
from millrace_kernels.testing.shapes import Dims

Experts = tuple[Tensor, Tensor] | tuple[Fp8, Fp8]  # w13, w2


def draw_experts(
    count: int, dim: int, size: int, dtype: torch.dtype, fp8: bool, device: torch.device, generator: torch.Generator
) -> Experts:
    """w13 [count, 2 size, dim] and w2 [count, dim, size] whose outputs are about as large as their inputs."""

    def draw(n: int, k: int) -> Tensor:
        return (torch.randn(n, k, generator=generator, device=device) * (2 / k) ** 0.5).to(dtype)

    w13, w2 = ([draw(n, k) for _ in range(count)] for n, k in ((2 * size, dim), (dim, size)))
    if not fp8:
        return torch.stack(w13), torch.stack(w2)
    return _stack([quant_blocks(w) for w in w13]), _stack([quant_blocks(w) for w in w2])


def _stack(parts: list[Fp8]) -> Fp8:
    return Fp8(torch.stack([p.data for p in parts]), torch.stack([p.scales for p in parts]))


def held_ids(experts: Tensor, first: int, count: int) -> Tensor:
    """Ids on a rank that holds `count` experts from `first` on: their index there, -1 for all others."""
    local = experts - first
    return local.masked_fill((local < 0) | (local >= count), -1)


def choose(
    num: int, dims: Dims, device: torch.device, generator: torch.Generator, skew: float = 0.0
) -> tuple[Tensor, Tensor]:
    """weights float32 [T, K], experts int32 [T, K] of V3's group-limited gate on random logits.

    skew: the n-th most popular expert is chosen about 1 / n**skew times as often as the first; 0: all alike.
    """
    logits = torch.randn(num, dims.experts, generator=generator, device=device)
    if skew:
        rank = torch.randperm(dims.experts, generator=generator, device=device) + 1
        logits = logits.exponential_(generator=generator).log_().neg_() - skew * rank.log()  # Gumbel noise
        logits = logits / 4  # sigmoid keeps the order as long as it does not saturate
    bias = torch.zeros(dims.experts, device=device)
    with forced(**{"moe_gate.moe_gate": ""}):
        return moe_gate(logits, bias, rule_of(dims))


def rule_of(dims: Dims, norm: bool = True, scaling: float = 2.5) -> GateRule:
    return GateRule(dims.groups, dims.topk_groups, dims.top_k, norm, scaling)
