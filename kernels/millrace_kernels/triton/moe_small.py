"""Experts for few tokens, where the read of the chosen experts' weights takes the time: two launches.

    h[a, t] = weight_te * silu(w13_e,gate x_t) * w13_e,up x_t      out_t = sum over a of w2_e h[a, t]

`a` counts choices, token by token. The first choice that names an expert e stands for it: its programs read e's
weights once and serve every token at once, with h = 0 for those that did not choose e; the other choices have nothing
to do. Up to four tokens are multiplied in FP32 registers (`moe_one.py`), more on the tensor cores in bfloat16, where a
tile of 16 rows costs no more than one. FP8 weights are multiplied as they are (E4M3 fits into bfloat16) and their block
scales applied to the sums.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, Fp8, Operand
from millrace_kernels.gpu import fitting
from millrace_kernels.triton import moe_one
from millrace_kernels.triton.moe_route import local_expert
from millrace_kernels.triton.small_linear import exact_bf16

MOST_TOKENS = 64  # that the kernels can take; the table gives them fewer


class MoeSmallConfig(NamedTuple):
    """The configuration of one launch. A program makes `block_n` columns, 128 terms of their sums at a time."""

    block_n: int
    num_warps: int
    num_stages: int  # of the pipeline of loads


Pair = tuple[MoeSmallConfig, MoeSmallConfig] | tuple[moe_one.MoeOneConfig, moe_one.MoeOneConfig]  # for w13 and w2

# By the number of tokens from which on they hold; `python -m millrace_bench.kernels.tune few` times others.
CONFIGS: dict[int, Pair] = {
    **moe_one.USED,
    5: (MoeSmallConfig(32, 4, 4), MoeSmallConfig(32, 4, 6)),
    9: (MoeSmallConfig(32, 4, 6), MoeSmallConfig(32, 4, 6)),
    17: (MoeSmallConfig(32, 4, 4), MoeSmallConfig(64, 4, 5)),
}


@triton.jit
def _choices(
    experts_ptr, weights_ptr, a, num_tokens,
    ROUTED: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, T_PAD: tl.constexpr, C_PAD: tl.constexpr,
):  # fmt: skip
    """The expert of choice `a`, whether `a` is the first choice of it, the tokens that chose it, and their weights."""
    token, choice = tl.arange(0, T_PAD)[:, None], tl.arange(0, C_PAD)[None, :]
    real = (token < num_tokens) & (choice < CHOICES)
    experts = local_expert(experts_ptr, token, choice, real, ROUTED, TOP_K)
    routed = real & (choice < TOP_K)
    weights = tl.load(weights_ptr + token * TOP_K + choice, mask=routed, other=1.0)
    number = token * CHOICES + choice
    expert = tl.max(tl.max(tl.where(real & (number == a), experts, -1), axis=1), axis=0)
    same = real & (experts == expert)
    leader = tl.min(tl.min(tl.where(same, number, T_PAD * CHOICES), axis=1), axis=0)
    chose = tl.max(same.to(tl.int32), axis=1) > 0
    weight = tl.sum(tl.where(same, weights, 0.0), axis=1)
    return expert, (expert >= 0) & (leader == a), chose, weight


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_up_kernel(
    x_ptr, experts_ptr, weights_ptr, w13_ptr, scales_ptr, h_ptr, leaders_ptr,
    num_tokens, stride_x,
    D: tl.constexpr, SIZE: tl.constexpr, ROUTED: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    T_PAD: tl.constexpr, C_PAD: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """N columns of h for the expert of choice `a`; and the first choice of each expert, -1 for none."""
    tile, a = tl.program_id(0), tl.program_id(1)
    expert, leads, chose, weight = _choices(
        experts_ptr, weights_ptr, a, num_tokens, ROUTED, TOP_K, CHOICES, T_PAD, C_PAD
    )
    if tile == 0:
        tl.store(leaders_ptr + a, tl.where(leads, expert, -1))
    if leads:
        t, n, col = tl.arange(0, T_PAD), tile * N + tl.arange(0, N), tl.arange(0, 128)
        row = tl.where(n < SIZE, n, 0)  # past the end the first row is read again and nothing stored
        w_ptr = w13_ptr + expert.to(tl.int64) * (2 * SIZE * D)
        blocks: tl.constexpr = D // 128
        gate_scales = scales_ptr + expert * (2 * SIZE // 128 * blocks) + tile * N // 128 * blocks
        up_scales = gate_scales + SIZE // 128 * blocks
        gate, up = tl.zeros([T_PAD, N], tl.float32), tl.zeros([T_PAD, N], tl.float32)
        for k0 in tl.range(0, D, 128, num_stages=STAGES):
            k = k0 + col
            mask = (t < num_tokens)[:, None] & (k < D)[None, :]
            x = tl.load(x_ptr + t[:, None] * stride_x + k[None, :], mask=mask, other=0.0).to(tl.bfloat16)
            at = w_ptr + row[:, None] * D + k[None, :]
            w_gate = exact_bf16(tl.load(at, mask=(k < D)[None, :], other=0.0))
            w_up = exact_bf16(tl.load(at + SIZE * D, mask=(k < D)[None, :], other=0.0))
            if FP8:
                gate += tl.dot(x, tl.trans(w_gate)) * tl.load(gate_scales + k0 // 128)
                up += tl.dot(x, tl.trans(w_up)) * tl.load(up_scales + k0 // 128)
            else:
                gate = tl.dot(x, tl.trans(w_gate), gate)
                up = tl.dot(x, tl.trans(w_up), up)
        h = tl.where(chose[:, None], gate * tl.sigmoid(gate) * up * weight[:, None], 0.0)
        at = h_ptr + (a * num_tokens + t)[:, None] * SIZE + n[None, :]
        tl.store(at, h, mask=(t < num_tokens)[:, None] & (n < SIZE)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_choices"])
def _down_kernel(
    h_ptr, leaders_ptr, w2_ptr, scales_ptr, out_ptr, num_tokens, num_choices,
    D: tl.constexpr, SIZE: tl.constexpr, CHOICES: tl.constexpr, T_PAD: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """N columns of the output: one sum over the choices that stand for an expert and over its inputs."""
    t, n, col = tl.arange(0, T_PAD), tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, 128)
    row = tl.where(n < D, n, 0)
    blocks: tl.constexpr = (SIZE + 127) // 128
    scales_ptr += tl.program_id(0) * N // 128 * blocks
    out = tl.zeros([T_PAD, N], tl.float32)
    for step in tl.range(0, num_choices * blocks, num_stages=STAGES):
        a, block = step // blocks, step % blocks
        expert = tl.load(leaders_ptr + a).to(tl.int64)
        i = block * 128 + col
        inside = (i < SIZE) & (expert >= 0)
        at = h_ptr + (a * num_tokens + t)[:, None] * SIZE + i[None, :]
        h = tl.load(at, mask=(t < num_tokens)[:, None] & inside[None, :], other=0.0).to(tl.bfloat16)
        at = w2_ptr + expert * (D * SIZE) + row[:, None] * SIZE + i[None, :]
        w = exact_bf16(tl.load(at, mask=inside[None, :], other=0.0))
        if FP8:
            scale = tl.load(scales_ptr + expert * (D // 128 * blocks) + block, mask=expert >= 0, other=0.0)
            out += tl.dot(h, tl.trans(w)) * scale
        else:
            out = tl.dot(h, tl.trans(w), out)
    mask = (t < num_tokens)[:, None] & (n < D)[None, :]
    tl.store(out_ptr + t[:, None] * D + n[None, :], out, mask=mask)


def moe_experts(
    x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Tensor | Fp8, w2: Tensor | Fp8,
    *, shared_expert: bool = False, num_experts: int = 0, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows = x.plain if isinstance(x, Operand) else x
    assert rows is not None, "few tokens are multiplied in their plain form"
    config = CONFIGS[max(least for least in CONFIGS if least <= max(rows.shape[0], 1))]
    return run(rows, weights, experts, w13, w2, shared_expert, config, out)


moe_experts_fp8 = moe_experts


def run(
    x: Tensor, weights: Tensor, experts: Tensor, w13: Tensor | Fp8, w2: Tensor | Fp8,
    shared_expert: bool, pair: Pair, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (up, down), (num, dim), top_k, fp8 = pair, x.shape, experts.shape[1], isinstance(w13, Fp8)
    w13_data, w13_scales = w13 if isinstance(w13, Fp8) else (w13, w13)
    w2_data, w2_scales = w2 if isinstance(w2, Fp8) else (w2, w2)
    held, _, size = w2_data.shape
    choices, routed = top_k + shared_expert, held - shared_expert
    assert num <= MOST_TOKENS and x.stride(1) == 1 and experts.is_contiguous() and weights.is_contiguous()
    assert all(tensor.is_contiguous() for tensor in (w13_data, w13_scales, w2_data, w2_scales))
    assert not fp8 or (BLOCK % up.block_n == 0 and BLOCK % down.block_n == 0), (up, down)
    out = torch.empty(num, dim, dtype=x.dtype, device=x.device) if out is None else out
    if not num:
        return out
    if isinstance(up, moe_one.MoeOneConfig) and isinstance(down, moe_one.MoeOneConfig):
        scales = (w13_scales, w2_scales) if fp8 else (None, None)
        return moe_one.run(x, weights, experts, (w13_data, w2_data), scales, shared_expert, (up, down), out)
    assert isinstance(up, MoeSmallConfig) and isinstance(down, MoeSmallConfig), pair
    padded = max(16, triton.next_power_of_2(num))
    stages = [
        fitting(launch.num_stages, BLOCK * (padded * x.itemsize + parts * launch.block_n * w13_data.itemsize))
        for launch, parts in ((up, 2), (down, 1))
    ]
    h = torch.empty(num * choices, num, size, dtype=x.dtype, device=x.device)
    leaders = torch.empty(num * choices, dtype=torch.int32, device=x.device)
    _gate_up_kernel[(triton.cdiv(size, up.block_n), num * choices)](
        x, experts, weights, w13_data, w13_scales, h, leaders, num, x.stride(0),
        dim, size, routed, top_k, choices, padded, triton.next_power_of_2(choices),
        up.block_n, stages[0], fp8, num_warps=up.num_warps,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(dim, down.block_n),)](
        h, leaders, w2_data, w2_scales, out, num, num * choices,
        dim, size, choices, padded, down.block_n, stages[1], fp8, num_warps=down.num_warps,
    )  # fmt: skip
    return out
