"""The router in two launches: logits, then one program per token for the choice.

What counts for up to some hundred tokens is to read the weight with all multiprocessors, so K is cut into parts of
SLICE columns; the program that chooses for a token adds them, in their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.moe_gate import GateRule, reference_gate_logits

SLICE, BLOCK_K = 256, 64  # columns of a part, all of them loaded at once, and of a product
BLOCK_E = 64  # experts of a program
MOST_TOKENS = 128  # of a program
BATCH = 4  # parts that are added to a token's sum at a time


@triton.jit(do_not_specialize=["num_tokens"])
def _logits_kernel(
    x_ptr, w_ptr, parts_ptr, num_tokens, stride_x,
    D: tl.constexpr, E: tl.constexpr, SLICE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The weight is the left operand: wgmma takes 64 of its rows, and as many tokens as there are."""
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    part, col = tl.program_id(2), tl.arange(0, BLOCK_K)
    is_expert, is_token = e < E, t < num_tokens
    total = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    for k0 in tl.range(part * SLICE, tl.minimum(part * SLICE + SLICE, D), BLOCK_K, num_stages=STAGES):
        k = (k0 + col)[None, :]
        w = tl.load(w_ptr + e[:, None] * D + k, mask=is_expert[:, None] & (k < D), other=0.0)
        x = tl.load(x_ptr + t[:, None] * stride_x + k, mask=is_token[:, None] & (k < D), other=0.0)
        total = tl.dot(w, tl.trans(x), total)
    at = (part * num_tokens + t)[:, None] * E + e[None, :]
    tl.store(parts_ptr + at, tl.trans(total), mask=is_token[:, None] & is_expert[None, :])


def gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [P, T, E] for bfloat16 operands; others are multiplied by the reference."""
    if not x.dtype == weight.dtype == torch.bfloat16:
        return reference_gate_logits(x, weight)
    (num, dim), (experts, _) = x.shape, weight.shape
    assert weight.is_contiguous() and x.stride(1) == 1, (x.stride(), weight.stride())
    parts = torch.empty(triton.cdiv(dim, SLICE), num, experts, dtype=torch.float32, device=x.device)
    if num:
        block_t = min(max(triton.next_power_of_2(num), 16), MOST_TOKENS)
        _logits_kernel[(triton.cdiv(experts, BLOCK_E), triton.cdiv(num, block_t), len(parts))](
            x, weight, parts, num, x.stride(0), dim, experts, SLICE, block_t, BLOCK_E, BLOCK_K,
            SLICE // BLOCK_K, num_warps=4,
        )  # fmt: skip
    return parts


@triton.jit
def ordered(x):
    """float32 -> int32 of the same order, whose maximum over a warp is one instruction. -0 comes before 0."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _largest(
    left, score, S: tl.constexpr, S_PAD: tl.constexpr, POSITIONS: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr
):
    """Scores [K_PAD] and experts of the TOP_K largest of `left` [POSITIONS], the first of equals: TOP_K times three
    reductions of integers by a warp.
    """
    position, k = tl.arange(0, POSITIONS), tl.arange(0, K_PAD)
    score = score.to(tl.int32, bitcast=True)  # positive: as integers in the same order
    weights, chosen = tl.zeros([K_PAD], tl.float32), tl.zeros([K_PAD], tl.int32)
    for rank in tl.static_range(TOP_K):
        first = tl.min(tl.where(left == tl.max(left, axis=0), position, POSITIONS), axis=0)
        weight = tl.max(tl.where(position == first, score, 0), axis=0).to(tl.float32, bitcast=True)
        weights = tl.where(k == rank, weight, weights)
        chosen = tl.where(k == rank, (first // S_PAD) * S + first % S_PAD, chosen)
        left = tl.where(position == first, -(2**31), left)
    return weights, chosen


@triton.jit
def _gate_kernel(
    logits_ptr, bias_ptr, num_tokens_ptr, loads_ptr, weights_ptr, experts_ptr, scaling, stride_part,
    PARTS: tl.constexpr, BATCH: tl.constexpr, STAGES: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    G_PAD: tl.constexpr, S_PAD: tl.constexpr, TOPK_GROUP: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """One token: G groups of S experts as a [G, S] tile, padded with -inf; positions keep the experts' order."""
    token = tl.program_id(0).to(tl.int64)
    g, s, k = tl.arange(0, G_PAD), tl.arange(0, S_PAD), tl.arange(0, K_PAD)
    position = tl.arange(0, G_PAD * S_PAD)
    expert = position // S_PAD * S + position % S_PAD
    real = (position // S_PAD < G) & (position % S_PAD < S)
    logits = tl.zeros([G_PAD * S_PAD], tl.float32)
    for first_part in tl.range(0, PARTS, BATCH, num_stages=STAGES):  # all loads under way before the first sum
        part = first_part + tl.arange(0, BATCH)[:, None]
        at = logits_ptr + part * stride_part + token * (G * S) + expert[None, :]
        logits += tl.sum(tl.load(at, mask=real[None, :] & (part < PARTS), other=0.0), axis=0)
    score = tl.sigmoid(logits)
    flat = tl.where(real, score + tl.load(bias_ptr + expert, mask=real, other=0.0), float("-inf"))
    choice = tl.reshape(flat, [G_PAD, S_PAD])

    best = tl.argmax(choice, axis=1, tie_break_left=True)
    others = tl.where(s[None, :] == best[:, None], float("-inf"), choice)
    group_score = tl.max(choice, axis=1) + tl.max(others, axis=1)
    mine, rival = group_score[:, None], group_score[None, :]
    ahead = (rival > mine) | ((rival == mine) & (g[None, :] < g[:, None]))
    kept = tl.sum(ahead.to(tl.int32), axis=1) < TOPK_GROUP
    left = tl.reshape(ordered(tl.where(kept[:, None], choice, float("-inf"))), [G_PAD * S_PAD])
    weights, chosen = _largest(left, score, S, S_PAD, G_PAD * S_PAD, TOP_K, K_PAD)
    if NORM:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    weights = weights * scaling
    if num_tokens_ptr is not None:
        is_token = token < tl.load(num_tokens_ptr)
        weights = tl.where(is_token, weights, 0.0)
        chosen = tl.where(is_token, chosen, -1)
    tl.store(weights_ptr + token * TOP_K + k, weights, mask=k < TOP_K)
    tl.store(experts_ptr + token * TOP_K + k, chosen, mask=k < TOP_K)
    if loads_ptr is not None:
        tl.atomic_add(loads_ptr + chosen, 1, mask=(k < TOP_K) & (chosen >= 0), sem="relaxed")


def moe_gate(
    logits: Tensor, bias: Tensor, rule: GateRule, num_tokens: Tensor | None = None, loads: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    num, experts = logits.shape[-2:]
    assert logits.is_contiguous() and bias.is_contiguous() and logits.dtype == bias.dtype == torch.float32
    weights = torch.empty(num, rule.top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num, rule.top_k, dtype=torch.int32, device=logits.device)
    if num:
        size, parts = experts // rule.n_group, logits.shape[0] if logits.dim() == 3 else 1
        batch = min(triton.next_power_of_2(parts), BATCH)
        _gate_kernel[(num,)](
            logits, bias, num_tokens, loads, weights, chosen, rule.routed_scaling_factor, num * experts,
            parts, batch, triton.cdiv(parts, BATCH), rule.n_group, size,
            triton.next_power_of_2(rule.n_group), triton.next_power_of_2(size), rule.topk_group, rule.top_k,
            triton.next_power_of_2(rule.top_k), rule.norm_topk_prob, num_warps=1,
        )  # fmt: skip
    return weights, chosen
