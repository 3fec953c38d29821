"""The router of few tokens in two launches: logits without a split of K, then one program per token for the choice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.triton.launch import go_ahead, options, wait

NEAR_ALL_TOKENS = 16  # that gate_logits can hold in registers


@triton.jit(do_not_specialize=["num_tokens"])
def _logits_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    num_tokens,
    stride_x,
    D: tl.constexpr,
    E: tl.constexpr,
    T_PAD: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every program multiplies all tokens by BLOCK_E rows; sums stay apart per column until the end."""
    t = tl.arange(0, T_PAD)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    col = tl.arange(0, BLOCK_K)
    acc = tl.zeros([T_PAD, BLOCK_E, BLOCK_K], tl.float32)
    wait(PDL)
    for k0 in tl.range(0, D, BLOCK_K, loop_unroll_factor=2):
        k = k0 + col
        w = tl.load(w_ptr + e[:, None] * D + k[None, :], mask=(e < E)[:, None] & (k < D)[None, :], other=0.0)
        mask = (t < num_tokens)[:, None] & (k < D)[None, :]
        x = tl.load(x_ptr + t[:, None] * stride_x + k[None, :], mask=mask, other=0.0)
        acc += x.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
    go_ahead(PDL)
    logits = tl.sum(acc, axis=2)
    mask = (t < num_tokens)[:, None] & (e < E)[None, :]
    tl.store(out_ptr + t[:, None] * E + e[None, :], logits, mask=mask)


def gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    (num, dim), (experts, _) = x.shape, weight.shape
    assert num <= NEAR_ALL_TOKENS and weight.is_contiguous() and x.stride(1) == 1, (x.shape, weight.shape)
    logits = torch.empty(num, experts, dtype=torch.float32, device=x.device)
    if num:
        padded = triton.next_power_of_2(num)
        block_k = min(triton.next_power_of_2(dim), 4096 // padded)
        _logits_kernel[(triton.cdiv(experts, 2),)](
            x, weight, logits, num, x.stride(0), dim, experts, padded, 2, block_k, **options(8 if padded > 1 else 4)
        )
    return logits


@triton.jit
def _gate_kernel(
    logits_ptr,
    bias_ptr,
    num_tokens_ptr,
    weights_ptr,
    experts_ptr,
    scaling,
    G: tl.constexpr,
    S: tl.constexpr,
    G_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: G groups of S experts as a [G, S] tile, padded with -inf; positions keep the experts' order."""
    token = tl.program_id(0).to(tl.int64)
    g, s, k = tl.arange(0, G_PAD), tl.arange(0, S_PAD), tl.arange(0, K_PAD)
    expert = g[:, None] * S + s[None, :]
    real = (g < G)[:, None] & (s < S)[None, :]
    wait(PDL)
    score = tl.sigmoid(tl.load(logits_ptr + token * (G * S) + expert, mask=real, other=0.0))
    choice = tl.where(real, score + tl.load(bias_ptr + expert, mask=real, other=0.0), float("-inf"))

    best = tl.argmax(choice, axis=1, tie_break_left=True)
    others = tl.where(s[None, :] == best[:, None], float("-inf"), choice)
    group_score = tl.max(choice, axis=1) + tl.max(others, axis=1)
    mine, rival = group_score[:, None], group_score[None, :]
    ahead = (rival > mine) | ((rival == mine) & (g[None, :] < g[:, None]))
    kept = tl.sum(ahead.to(tl.int32), axis=1) < TOPK_GROUP
    left = tl.reshape(tl.where(kept[:, None], choice, float("-inf")), [G_PAD * S_PAD])
    score = tl.reshape(score, [G_PAD * S_PAD])
    position = tl.arange(0, G_PAD * S_PAD)

    weights, chosen = tl.zeros([K_PAD], tl.float32), tl.zeros([K_PAD], tl.int32)
    for rank in tl.static_range(TOP_K):
        first = tl.argmax(left, axis=0, tie_break_left=True)
        weights = tl.where(k == rank, tl.sum(tl.where(position == first, score, 0.0), axis=0), weights)
        chosen = tl.where(k == rank, (first // S_PAD) * S + first % S_PAD, chosen)
        left = tl.where(position == first, float("-inf"), left)
    if NORM:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    weights = weights * scaling
    if num_tokens_ptr is not None:
        is_token = token < tl.load(num_tokens_ptr)
        weights = tl.where(is_token, weights, 0.0)
        chosen = tl.where(is_token, chosen, -1)
    go_ahead(PDL)
    tl.store(weights_ptr + token * TOP_K + k, weights, mask=k < TOP_K)
    tl.store(experts_ptr + token * TOP_K + k, chosen, mask=k < TOP_K)


def moe_gate(
    logits: Tensor,
    bias: Tensor,
    *,
    n_group: int,
    topk_group: int,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    num_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    num, experts = logits.shape
    assert logits.is_contiguous() and bias.is_contiguous() and logits.dtype == bias.dtype == torch.float32
    weights = torch.empty(num, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num, top_k, dtype=torch.int32, device=logits.device)
    if num:
        size = experts // n_group
        _gate_kernel[(num,)](
            logits,
            bias,
            num_tokens,
            weights,
            chosen,
            routed_scaling_factor,
            n_group,
            size,
            triton.next_power_of_2(n_group),
            triton.next_power_of_2(size),
            topk_group,
            top_k,
            triton.next_power_of_2(top_k),
            norm_topk_prob,
            **options(num_warps=1),
        )
    return weights, chosen
