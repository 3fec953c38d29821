"""Logits -> tokens: filters, temperature and a draw that can be repeated.

    temperature 0: argmax l, the smallest id of equals
    else y = l / temperature, p = softmax(y), restricted in this order and renormalised after each:
        top_k  the k most likely, smaller ids first among equals
        top_p  the shortest prefix of the sorted rest whose mass reaches top_p, one token at least
        min_p  p >= min_p * max p
    draw by Gumbel-max: argmax y_t + g_t, g_t = -log(-log(u)), u = hash(seed, output position, t)

The hash is integer arithmetic and g is rounded once from float64, so the noise of a (seed, position, token) is the same
in every batch and on every device. Letters: S sampled rows, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from millrace_kernels.backend import implementation

M32 = 0xFFFFFFFF


class SampleParams(NamedTuple):
    """Of each sampled row."""

    temperature: Tensor  # float32 [S], 0 is greedy
    top_k: Tensor  # int64 [S], 0 keeps all
    top_p: Tensor  # float32 [S]
    min_p: Tensor  # float32 [S]
    seeds: Tensor  # int64 [S], the bits of a u64


def sample_tokens(
    logits: Tensor, params: SampleParams, output_index: Tensor, *, draws: bool = True, filters: bool = True
) -> Tensor:
    """logits float32 [S, V], -inf where a token is not allowed -> int64 [S].

    Args:
        output_index: int64 [S], the output's position in its sequence.
        draws: False when every temperature is 0.
        filters: False when no drawn row has a top_k, top_p or min_p. The host decides both.
    Notes:
        Nothing here waits for a GPU. A row of nothing but -inf gives token 0, one with NaN some token.
    """
    rows = logits.shape[:1]
    assert all(x.shape == rows for x in (*params, output_index)), logits.shape
    if run := implementation("sample_tokens.sample_tokens", logits.device, logits.shape[0]):
        return run(logits, params, output_index, draws=draws, filters=filters)
    temperature, top_k, top_p, min_p, seeds = params
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
    key = mix32(mix32(seeds & M32) ^ ((seeds >> 32) & M32))
    key = mix32(key ^ mix32(output_index & M32))
    bits = mix32(mix32(key[:, None] ^ mix32(tokens)[None, :]) + key[:, None])
    uniform = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).float()


def mix32(x: Tensor) -> Tensor:
    """Bijection of u32 held in int64 (finalizer of MurmurHash3)."""
    x = x & M32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & M32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & M32
    return x ^ (x >> 16)
