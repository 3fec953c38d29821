"""Experts for one token or a few, where the read of their experts' weights takes the time: two launches on CUDA cores.

    h_a = weight_a * silu(w13_a,gate x) * w13_a,up x      out = sum over a of w2_a h_a

`a` counts the choices, token by token; one without an expert adds nothing. An expert named twice is read twice, the
second time from L2: few tokens seldom name the same routed one. Weights are read as in `gemv.py`. For w2, h is one
vector of all choices of a token, and each run of its columns looks up whose rows it meets. Everything is FP32 from the
weights on, except h in memory, which has x's dtype.
"""

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.triton.gemv import columns, dot_runs, run_scales, run_values
from millrace_kernels.triton.moe_route import local_expert


class MoeOneConfig(NamedTuple):
    """The configuration of one launch, as `gemv.Gemv`. w13's programs make block_n columns of gate and of up."""

    block_n: int
    block_k: int
    num_warps: int


Pair = tuple[MoeOneConfig, MoeOneConfig]  # for w13 and w2

# By tokens; `python -m millrace_bench.kernels.tune few` times others.
USED: dict[int, Pair] = {
    1: (MoeOneConfig(2, 1024, 1), MoeOneConfig(4, 512, 1)),
    2: (MoeOneConfig(1, 2048, 1), MoeOneConfig(16, 512, 4)),
    3: (MoeOneConfig(1, 512, 1), MoeOneConfig(16, 512, 4)),
    4: (MoeOneConfig(2, 1024, 1), MoeOneConfig(16, 512, 4)),
}


@triton.jit
def _gate_up_one(
    x_ptr, experts_ptr, weights_ptr, w13_ptr, scales_ptr, h_ptr, held_ptr, stride_x,
    D: tl.constexpr, SIZE: tl.constexpr, ROUTED: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    N: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """N columns of h of choice `a`; and the expert's row in the weights, -1 if it is not here."""
    tile_n, a = tl.program_id(0), tl.program_id(1)
    token, choice = a // CHOICES, a % CHOICES
    x_ptr += token * stride_x
    expert = local_expert(experts_ptr, token, choice, choice < CHOICES, ROUTED, TOP_K)
    weight = tl.load(weights_ptr + token * TOP_K + choice, mask=choice < TOP_K, other=1.0)
    if tile_n == 0:
        tl.store(held_ptr + a, expert)
    if expert >= 0:
        n = tile_n * N + tl.arange(0, N)
        gate_rows = w13_ptr + expert.to(tl.int64) * (2 * SIZE * D) + tl.minimum(n, SIZE - 1)[:, None] * D
        up_rows = gate_rows + SIZE * D
        gate_scales, up_scales = scales_ptr, scales_ptr
        if scales_ptr is not None:
            gate_scales += (expert * (2 * SIZE // 128) + tile_n * N // 128) * (D // 128)
            up_scales = gate_scales + SIZE // 128 * (D // 128)
        gate, up = columns(gate_rows, 0, D, BLOCK_K), columns(up_rows, 0, D, BLOCK_K)
        gate_sum = tl.zeros([N, BLOCK_K // RUN], tl.float32)
        up_sum = tl.zeros([N, BLOCK_K // RUN], tl.float32)
        for tile in tl.static_range(TILES):
            next_gate, next_up = gate, up
            if tile + 1 < TILES:
                next_gate, next_up = columns(gate_rows, tile + 1, D, BLOCK_K), columns(up_rows, tile + 1, D, BLOCK_K)
            x = run_values(x_ptr, tile, D, BLOCK_K, RUN)
            gate_sum += dot_runs(gate, x, run_scales(gate_scales, 1, tile, D, BLOCK_K, RUN))
            up_sum += dot_runs(up, x, run_scales(up_scales, 1, tile, D, BLOCK_K, RUN))
            gate, up = next_gate, next_up
        total, up_total = tl.sum(gate_sum, axis=1), tl.sum(up_sum, axis=1)
        h = total * tl.sigmoid(total) * up_total * weight
        tl.store(h_ptr + a * SIZE + n, h, mask=n < SIZE)


@triton.jit
def _down_tile(
    h_ptr, held_ptr, w2_ptr, scales_ptr, row, row_block, tile: tl.constexpr,
    D: tl.constexpr, SIZE: tl.constexpr, CHOICES: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """A tile [N, BLOCK_K] of w2, h as float32 [R, RUN] and the scale [R] of each run."""
    blocks: tl.constexpr = SIZE // 128
    run = tile * (BLOCK_K // RUN) + tl.arange(0, BLOCK_K // RUN)
    a, i = run * RUN // SIZE, run * RUN % SIZE
    expert = tl.load(held_ptr + a, mask=a < CHOICES, other=-1)
    here = (expert >= 0)[:, None] & (tl.arange(0, RUN) >= 0)[None, :]
    at = (expert.to(tl.int64) * (D * SIZE) + i)[:, None] + tl.arange(0, RUN)[None, :]
    col = tl.max_contiguous(tl.multiple_of(tl.reshape(at, [BLOCK_K]), RUN), RUN)
    mask = tl.max_constancy(tl.reshape(here, [BLOCK_K]), RUN)
    w2 = tl.load(w2_ptr + row[:, None] * SIZE + col[None, :], mask=mask[None, :], other=0.0)
    h_at = (run * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    h = tl.load(h_ptr + h_at, mask=here, other=0.0).to(tl.float32)
    if scales_ptr is None:
        scale = tl.full([BLOCK_K // RUN], 1.0, tl.float32)
    else:
        at_scale = (expert * (D // 128) + row_block) * blocks + i // 128
        scale = tl.load(scales_ptr + at_scale, mask=expert >= 0, other=0.0)
    return w2, h, scale


@triton.jit
def _down_one(
    h_ptr, held_ptr, w2_ptr, scales_ptr, out_ptr,
    D: tl.constexpr, SIZE: tl.constexpr, CHOICES: tl.constexpr,
    N: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """N columns of the output of a token."""
    token = tl.program_id(1)
    h_ptr, held_ptr, out_ptr = h_ptr + token * CHOICES * SIZE, held_ptr + token * CHOICES, out_ptr + token * D
    n = tl.program_id(0) * N + tl.arange(0, N)
    row, row_block = tl.minimum(n, D - 1), tl.program_id(0) * N // 128
    total = tl.zeros([N, BLOCK_K // RUN], tl.float32)
    w2, h, scale = _down_tile(h_ptr, held_ptr, w2_ptr, scales_ptr, row, row_block, 0, D, SIZE, CHOICES, BLOCK_K, RUN)
    for tile in tl.static_range(1, TILES):
        next_w2, next_h, next_scale = _down_tile(
            h_ptr, held_ptr, w2_ptr, scales_ptr, row, row_block, tile, D, SIZE, CHOICES, BLOCK_K, RUN
        )
        total += dot_runs(w2, h, scale)
        w2, h, scale = next_w2, next_h, next_scale
    total += dot_runs(w2, h, scale)
    tl.store(out_ptr + n, tl.sum(total, axis=1), mask=n < D)


def run(
    x: Tensor, weights: Tensor, experts: Tensor, w13_w2: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor] | tuple[None, None], shared_expert: bool, pair: Pair, out: Tensor,
) -> Tensor:  # fmt: skip
    """x [T, D] -> out [T, D]; everything contiguous but the rows of x, scales with FP8 weights only."""
    (w13, w2), (w13_scales, w2_scales), (up, down) = w13_w2, scales, pair
    (num, dim), top_k, (held, _, size) = x.shape, experts.shape[1], w2.shape
    choices = top_k + shared_expert
    h = torch.empty(num * choices, size, dtype=x.dtype, device=x.device)
    rows = torch.empty(num * choices, dtype=torch.int32, device=x.device)
    _gate_up_one[(triton.cdiv(size, up.block_n), num * choices)](
        x, experts, weights, w13, w13_scales, h, rows, x.stride(0),
        dim, size, held - shared_expert, top_k, choices,
        up.block_n, up.block_k, triton.cdiv(dim, up.block_k), gcd(dim, 16), num_warps=up.num_warps,
    )  # fmt: skip
    _down_one[(triton.cdiv(dim, down.block_n), num)](
        h, rows, w2, w2_scales, out, dim, size, choices,
        down.block_n, down.block_k, triton.cdiv(choices * size, down.block_k), gcd(size, 16), num_warps=down.num_warps,
    )  # fmt: skip
    return out
