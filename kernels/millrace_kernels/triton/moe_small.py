"""Experts for few tokens, where time is what reading the weights of the chosen experts costs: two launches.

    h[a, t] = weight_te * silu(w13_e,gate x_t) * w13_e,up x_t      out_t = sum over a of w2_e h[a, t]

`a` counts choices, token by token. The first choice that names an expert e stands for it: its programs read e's
weights once and serve every token at once, with h = 0 for those that did not choose e; the other choices have nothing
to do. One token is multiplied in FP32 registers, several on the tensor cores in bfloat16, where a tile of 16 rows
costs no more than one. FP8 weights are multiplied as they are (E4M3 fits into bfloat16) and their block scales applied
to the sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, Fp8, Operand
from millrace_kernels.triton.launch import go_ahead, options, wait
from millrace_kernels.triton.moe_route import local_expert

MOST_TOKENS = 64  # that the kernels can take; the table gives them fewer


class Config(NamedTuple):
    """Of one launch. A program makes `block_n` columns, `blocks_k` * 128 terms of their sums at a time."""

    block_n: int
    blocks_k: int
    num_warps: int
    num_stages: int  # of the pipeline of loads


# By the number of tokens from which on they hold, for w13 and w2; millrace_bench.kernels.tune_moe times others.
CONFIGS = {
    1: (Config(4, 4, 4, 5), Config(16, 2, 4, 5)),
    2: (Config(16, 1, 4, 6), Config(16, 1, 4, 6)),
    9: (Config(32, 1, 4, 4), Config(32, 1, 4, 6)),
    17: (Config(32, 1, 4, 4), Config(64, 1, 4, 5)),
}


@triton.jit
def _choices(
    experts_ptr, weights_ptr, a, num_tokens, first_expert,
    ROUTED: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, T_PAD: tl.constexpr, C_PAD: tl.constexpr,
):  # fmt: skip
    """The expert that choice `a` names, whether it is the first to do so, who chose it, and with which weight."""
    token, choice = tl.arange(0, T_PAD)[:, None], tl.arange(0, C_PAD)[None, :]
    real = (token < num_tokens) & (choice < CHOICES)
    experts = local_expert(experts_ptr, token, choice, real, first_expert, ROUTED, TOP_K)
    routed = real & (choice < TOP_K)
    weights = tl.load(weights_ptr + token * TOP_K + choice, mask=routed, other=1.0)
    number = token * CHOICES + choice
    expert = tl.max(tl.max(tl.where(real & (number == a), experts, -1), axis=1), axis=0)
    same = real & (experts == expert)
    leader = tl.min(tl.min(tl.where(same, number, T_PAD * CHOICES), axis=1), axis=0)
    chose = tl.max(same.to(tl.int32), axis=1) > 0
    weight = tl.sum(tl.where(same, weights, 0.0), axis=1)
    return expert, (expert >= 0) & (leader == a), chose, weight


@triton.jit
def _one_token(
    x_ptr, w_ptr, up_offset, scales_ptr, up_scales_offset, row,
    K: tl.constexpr, N: tl.constexpr, BLOCKS_K: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """sum over k of x[k] w[row, k] for the gate's rows and up's, [N] each, which lie in one block of scales each."""
    block, col = tl.arange(0, BLOCKS_K), tl.arange(0, 128)
    gate, up = tl.zeros([N, BLOCKS_K, 128], tl.float32), tl.zeros([N, BLOCKS_K, 128], tl.float32)
    for k0 in tl.range(0, K, BLOCKS_K * 128, num_stages=STAGES):
        k = k0 + block[:, None] * 128 + col[None, :]
        inside = k < K
        x = tl.load(x_ptr + k, mask=inside, other=0.0).to(tl.float32)
        at = w_ptr + row[:, None, None] * K + k[None, :, :]
        w_gate = tl.load(at, mask=inside[None, :, :], other=0.0).to(tl.float32)
        w_up = tl.load(at + up_offset, mask=inside[None, :, :], other=0.0).to(tl.float32)
        if FP8:
            at = scales_ptr + k0 // 128 + block
            real = k0 // 128 + block < K // 128
            gate += w_gate * (x * tl.load(at, mask=real, other=0.0)[:, None])[None, :, :]
            up += w_up * (x * tl.load(at + up_scales_offset, mask=real, other=0.0)[:, None])[None, :, :]
        else:
            gate += w_gate * x[None, :, :]
            up += w_up * x[None, :, :]
    return tl.sum(tl.sum(gate, axis=2), axis=1)[None, :], tl.sum(tl.sum(up, axis=2), axis=1)[None, :]


@triton.jit(do_not_specialize=["num_tokens", "first_expert"])
def _gate_up_kernel(
    x_ptr, experts_ptr, weights_ptr, w13_ptr, scales_ptr, h_ptr, leaders_ptr,
    num_tokens, first_expert, stride_x,
    D: tl.constexpr, SIZE: tl.constexpr, ROUTED: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    T_PAD: tl.constexpr, C_PAD: tl.constexpr, N: tl.constexpr, BLOCKS_K: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N columns of h for the expert that choice `a` stands for; and who stands for which expert, -1 for nobody."""
    tile, a = tl.program_id(0), tl.program_id(1)
    wait(PDL)
    expert, leads, chose, weight = _choices(
        experts_ptr, weights_ptr, a, num_tokens, first_expert, ROUTED, TOP_K, CHOICES, T_PAD, C_PAD
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
        if T_PAD == 1:
            gate, up = _one_token(
                x_ptr, w_ptr, SIZE * D, gate_scales, SIZE // 128 * blocks, row, D, N, BLOCKS_K, STAGES, FP8
            )
        else:
            gate, up = tl.zeros([T_PAD, N], tl.float32), tl.zeros([T_PAD, N], tl.float32)
            for k0 in tl.range(0, D, 128, num_stages=STAGES):
                k = k0 + col
                mask = (t < num_tokens)[:, None] & (k < D)[None, :]
                x = tl.load(x_ptr + t[:, None] * stride_x + k[None, :], mask=mask, other=0.0).to(tl.bfloat16)
                at = w_ptr + row[:, None] * D + k[None, :]
                w_gate = tl.load(at, mask=(k < D)[None, :], other=0.0).to(tl.bfloat16)
                w_up = tl.load(at + SIZE * D, mask=(k < D)[None, :], other=0.0).to(tl.bfloat16)
                if FP8:
                    gate += tl.dot(x, tl.trans(w_gate)) * tl.load(gate_scales + k0 // 128)
                    up += tl.dot(x, tl.trans(w_up)) * tl.load(up_scales + k0 // 128)
                else:
                    gate = tl.dot(x, tl.trans(w_gate), gate)
                    up = tl.dot(x, tl.trans(w_up), up)
        go_ahead(PDL)
        h = tl.where(chose[:, None], gate * tl.sigmoid(gate) * up * weight[:, None], 0.0)
        at = h_ptr + (a * num_tokens + t)[:, None] * SIZE + n[None, :]
        tl.store(at, h, mask=(t < num_tokens)[:, None] & (n < SIZE)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_choices"])
def _down_kernel(
    h_ptr, leaders_ptr, w2_ptr, scales_ptr, out_ptr, num_tokens, num_choices,
    D: tl.constexpr, SIZE: tl.constexpr, CHOICES: tl.constexpr, T_PAD: tl.constexpr, N: tl.constexpr,
    BLOCKS_K: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N columns of the output: one sum over the choices that stand for an expert and over its inputs."""
    t, n, col = tl.arange(0, T_PAD), tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, 128)
    row = tl.where(n < D, n, 0)
    blocks: tl.constexpr = (SIZE + 127) // 128
    scales_ptr += tl.program_id(0) * N // 128 * blocks
    wait(PDL)
    if T_PAD == 1:
        block = tl.arange(0, BLOCKS_K)
        acc = tl.zeros([N, BLOCKS_K, 128], tl.float32)
        steps: tl.constexpr = (blocks + BLOCKS_K - 1) // BLOCKS_K
        for step in tl.range(0, CHOICES * steps, num_stages=STAGES):
            a, i_block = step // steps, step % steps * BLOCKS_K + block
            expert = tl.load(leaders_ptr + a).to(tl.int64)
            i = i_block[:, None] * 128 + col[None, :]
            inside = (i < SIZE) & (expert >= 0)
            h = tl.load(h_ptr + a * SIZE + i, mask=inside, other=0.0).to(tl.float32)
            if FP8:
                at = scales_ptr + expert * (D // 128 * blocks) + i_block
                h *= tl.load(at, mask=(i_block < blocks) & (expert >= 0), other=0.0)[:, None]
            at = w2_ptr + expert * (D * SIZE) + row[:, None, None] * SIZE + i[None, :, :]
            acc += tl.load(at, mask=inside[None, :, :], other=0.0).to(tl.float32) * h[None, :, :]
        out = tl.sum(tl.sum(acc, axis=2), axis=1)[None, :]
    else:
        out = tl.zeros([T_PAD, N], tl.float32)
        for step in tl.range(0, num_choices * blocks, num_stages=STAGES):
            a, block = step // blocks, step % blocks
            expert = tl.load(leaders_ptr + a).to(tl.int64)
            i = block * 128 + col
            inside = (i < SIZE) & (expert >= 0)
            at = h_ptr + (a * num_tokens + t)[:, None] * SIZE + i[None, :]
            h = tl.load(at, mask=(t < num_tokens)[:, None] & inside[None, :], other=0.0).to(tl.bfloat16)
            at = w2_ptr + expert * (D * SIZE) + row[:, None] * SIZE + i[None, :]
            w = tl.load(at, mask=inside[None, :], other=0.0).to(tl.bfloat16)
            if FP8:
                scale = tl.load(scales_ptr + expert * (D // 128 * blocks) + block, mask=expert >= 0, other=0.0)
                out += tl.dot(h, tl.trans(w)) * scale
            else:
                out = tl.dot(h, tl.trans(w), out)
    go_ahead(PDL)
    mask = (t < num_tokens)[:, None] & (n < D)[None, :]
    tl.store(out_ptr + t[:, None] * D + n[None, :], out, mask=mask)


def moe_experts(
    x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Tensor | Fp8, w2: Tensor | Fp8, first_expert: int,
    *, shared_expert: bool = False, num_experts: int = 0,
) -> Tensor:  # fmt: skip
    rows = x.plain if isinstance(x, Operand) else x
    assert rows is not None, "few tokens are multiplied in their plain form"
    up, down = configs(rows.shape[0])
    return run(rows, weights, experts, w13, w2, first_expert, shared_expert, up, down)


moe_experts_fp8 = moe_experts


def configs(num_tokens: int) -> tuple[Config, Config]:
    return CONFIGS[max(least for least in CONFIGS if least <= max(num_tokens, 1))]


def run(
    x: Tensor, weights: Tensor, experts: Tensor, w13: Tensor | Fp8, w2: Tensor | Fp8, first_expert: int,
    shared_expert: bool, up: Config, down: Config,
) -> Tensor:  # fmt: skip
    (num, dim), top_k, fp8 = x.shape, experts.shape[1], isinstance(w13, Fp8)
    w13_data, w13_scales = w13 if isinstance(w13, Fp8) else (w13, w13)
    w2_data, w2_scales = w2 if isinstance(w2, Fp8) else (w2, w2)
    held, _, size = w2_data.shape
    choices, routed = top_k + shared_expert, held - shared_expert
    assert num <= MOST_TOKENS and x.stride(1) == 1 and experts.is_contiguous() and weights.is_contiguous()
    assert all(tensor.is_contiguous() for tensor in (w13_data, w13_scales, w2_data, w2_scales))
    assert not fp8 or (BLOCK % up.block_n == 0 and BLOCK % down.block_n == 0), (up, down)
    out = torch.empty(num, dim, dtype=x.dtype, device=x.device)
    if not num:
        return out
    padded = 1 if num == 1 else max(16, triton.next_power_of_2(num))
    h = torch.empty(num * choices, num, size, dtype=x.dtype, device=x.device)
    leaders = torch.empty(num * choices, dtype=torch.int32, device=x.device)
    _gate_up_kernel[(triton.cdiv(size, up.block_n), num * choices)](
        x, experts, weights, w13_data, w13_scales, h, leaders, num, first_expert, x.stride(0),
        dim, size, routed, top_k, choices, padded, triton.next_power_of_2(choices),
        up.block_n, up.blocks_k, up.num_stages, fp8, **options(up.num_warps),
    )  # fmt: skip
    _down_kernel[(triton.cdiv(dim, down.block_n),)](
        h, leaders, w2_data, w2_scales, out, num, num * choices,
        dim, size, choices, padded, down.block_n, down.blocks_k, down.num_stages, fp8, **options(down.num_warps),
    )  # fmt: skip
    return out
