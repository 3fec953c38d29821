from __future__ import annotations

import torch
from torch import Tensor

M32 = 0xFFFFFFFF


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    output_index: Tensor,
    *,
    draws: bool = True,
    filters: bool = True,
) -> Tensor:
    greedy = logits.argmax(dim=-1)
    if not draws:
        return greedy
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    if filters:
        scaled = filtered(scaled, top_k, top_p, min_p)
    noise = gumbel_noise(seeds, output_index, logits.shape[1])
    return torch.where(temperature > 0, (scaled + noise).argmax(dim=-1), greedy)


def filtered(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """-inf outside of top_k, then of top_p and of min_p of what is left."""
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(values.shape[1], device=values.device)
    limit = torch.where(top_k > 0, top_k, values.shape[1])[:, None]
    values = values.masked_fill(rank >= limit, -torch.inf)
    probs = values.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    values = values.masked_fill((mass_before >= top_p[:, None]) & (top_p < 1)[:, None] & (rank > 0), -torch.inf)
    values = values.masked_fill(values < values[:, :1] + torch.log(min_p)[:, None], -torch.inf)
    return torch.empty_like(values).scatter_(1, order, values)


def gumbel_noise(seeds: Tensor, output_index: Tensor, vocab_size: int) -> Tensor:
    """int64 [S] (u64 bits), int64 [S] -> float32 [S, V]."""
    tokens = torch.arange(vocab_size, device=seeds.device)
    key = _mix32(_mix32(seeds & M32) ^ ((seeds >> 32) & M32))
    key = _mix32(key ^ _mix32(output_index & M32))
    bits = _mix32(_mix32(key[:, None] ^ _mix32(tokens)[None, :]) + key[:, None])
    uniform = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).float()


def _mix32(x: Tensor) -> Tensor:
    """Bijection of u32 held in int64 (finalizer of MurmurHash3)."""
    x = x & M32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & M32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & M32
    return x ^ (x >> 16)
