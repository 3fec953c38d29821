"""Experts as two grouped GEMMs of our own that gather their rows by themselves: plain weights, or FP8 times FP8.

    h[r] = silu_mul(w13_e x[token of r])   y[r] = w2_e h[r]   for the rows r of expert e      out_t = sum of weight * y

SwiGLU, and with FP8 the quantisation of h, happen where the first GEMM ends, so gate_up is never written. For plain
weights this is the one implementation for many tokens; for FP8 it serves where a few rows per expert leave DeepGEMM's
tiles empty, where sparing its copies was measured to be worth more than its speed, and where DeepGEMM is missing.

Where reading FP8 weights takes the time, `programs` of every SM walk over the tiles (moe_persistent).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, Fp8, Operand, quant_groups
from millrace_kernels.gpu import measured
from millrace_kernels.moe_experts import expected_rows
from millrace_kernels.triton import moe_persistent
from millrace_kernels.triton.launch import go_ahead, options, wait
from millrace_kernels.triton.moe_route import Blocks, Route, route, slices
from millrace_kernels.triton.moe_rows import combine
from millrace_kernels.triton.quant import quantise


class Launch(NamedTuple):
    """Of one of the two: 128 bytes of the terms at a time, `stages` of them under way."""

    warps: int
    stages: int
    block_n: int = BLOCK  # columns of a tile; of w13's always 128, one group of the quantised h
    programs: int = 0  # of an SM, that walk over the tiles of FP8 weights; 0: one for every tile


class Config(NamedTuple):
    block_m: int  # rows of a tile
    up: Launch
    down: Launch


def _both(block_m: int, block_n: int, warps: int, stages: int) -> Config:
    return Config(block_m, Launch(warps, stages), Launch(warps, stages, block_n))


# By the expected rows of an expert up to which they hold.
CONFIGS = {
    16: _both(16, 64, 4, 4),
    32: _both(32, 128, 8, 3),
    64: _both(64, 128, 8, 3),
    1 << 30: _both(128, 128, 8, 3),
}
UNTUNED = _both(64, 64, 4, 2)  # what one would begin with, for comparison

# (expected rows of an expert, E, I) -> the fastest of `python -m millrace_bench.kernels.tune_moe`, where it beats
# DeepGEMM with what that needs around it.
MEASURED: dict[tuple[int, int, int], Config] = {
    (1, 256, 256): CONFIGS[16],  # TP8, 8 to 32 tokens: 108-269 us, DeepGEMM 158-328, few-token kernels 120-671
    (1, 257, 256): CONFIGS[16],  # the same with the shared expert
    # A step of EP8, 128 tokens: 397 us with a program for every tile, DeepGEMM 414.
    (32, 33, 2048): Config(32, Launch(4, 3, programs=2), Launch(4, 3, programs=3)),
}


def config(rows: int, num_held: int, size: int) -> Config:
    return measured(MEASURED, (rows, num_held, size)) or CONFIGS[min(most for most in CONFIGS if rows <= most)]


def is_measured(num_tokens: int, shape: tuple[int, ...]) -> bool:
    """Whether this is the fastest for experts w2 [E, D, I] that expect so many rows each; shape: (E, D, I, rows)."""
    num_held, _, size, rows = shape
    return measured(MEASURED, (rows, num_held, size)) is not None


@triton.jit
def _add_product(total, x, w, scale, FP8: tl.constexpr):
    """total [M, N] + x [M, K] times w [N, K], with FP8 by scale [M]."""
    if FP8:
        total += tl.dot(x, tl.trans(w)) * scale[:, None]
    else:
        total = tl.dot(x, tl.trans(w), total)
    return total


@triton.jit
def _gate_up_kernel(
    x_ptr, x_scales_ptr, w13_ptr, w_scales_ptr, h_ptr, h_scales_ptr, tokens_ptr, blocks_ptr, ends_ptr, total_ptr,
    stride_x, stride_scale_t, stride_scale_k, stride_h_scale,
    D: tl.constexpr, SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (SIZE + N - 1) // N
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    wait(PDL)
    if block * M < tl.load(total_ptr):
        expert = tl.load(blocks_ptr + block)
        r, n, col = block * M + tl.arange(0, M), tile * N + tl.arange(0, N), tl.arange(0, K)
        real = r < tl.load(ends_ptr + expert)
        token = tl.load(tokens_ptr + r, mask=real, other=0).to(tl.int64)
        x_at = x_ptr + token[:, None] * stride_x
        w_at = w13_ptr + expert.to(tl.int64) * (2 * SIZE * D) + tl.where(n < SIZE, n, 0)[:, None] * D
        scales_at = w_scales_ptr + (expert.to(tl.int64) * (2 * SIZE // 128) + tile * N // 128) * (D // 128)
        gate, up = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
        scale, gate_scale, up_scale = tl.zeros([M], tl.float32), 0.0, 0.0
        up_scales_at = scales_at + SIZE // 128 * (D // 128)
        if FP8:
            gate_scale, up_scale = tl.load(scales_at), tl.load(up_scales_at)
        for k0 in tl.range(0, D, K, num_stages=STAGES):
            k = (k0 + col)[None, :]
            if FP8:  # scalars are not pipelined
                after = tl.minimum(k0 // 128 + 1, D // 128 - 1)
                next_gate_scale, next_up_scale = tl.load(scales_at + after), tl.load(up_scales_at + after)
            x = tl.load(x_at + k, mask=real[:, None] & (k < D), other=0.0)
            w_gate = tl.load(w_at + k, mask=k < D, other=0.0)
            w_up = tl.load(w_at + SIZE * D + k, mask=k < D, other=0.0)
            if FP8:
                at = x_scales_ptr + token * stride_scale_t + k0 // 128 * stride_scale_k
                scale = tl.load(at, mask=real, other=0.0)
            gate = _add_product(gate, x, w_gate, scale * gate_scale, FP8)
            up = _add_product(up, x, w_up, scale * up_scale, FP8)
            if FP8:
                gate_scale, up_scale = next_gate_scale, next_up_scale
        go_ahead(PDL)
        h = gate * tl.sigmoid(gate) * up
        at, mask = h_ptr + r.to(tl.int64)[:, None] * SIZE + n[None, :], real[:, None] & (n < SIZE)[None, :]
        if FP8:
            h8, h_scale = quantise(h)
            tl.store(at, h8, mask=mask)
            tl.store(h_scales_ptr + tile * stride_h_scale + r, h_scale, mask=real)
        else:
            tl.store(at, h, mask=mask)


@triton.jit
def _down_kernel(
    h_ptr, h_scales_ptr, w2_ptr, w_scales_ptr, y_ptr, blocks_ptr, ends_ptr, total_ptr, stride_h_scale,
    D: tl.constexpr, SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (D + N - 1) // N
    groups: tl.constexpr = SIZE // 128
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    wait(PDL)
    if block * M < tl.load(total_ptr):
        expert = tl.load(blocks_ptr + block)
        r, n, col = (block * M + tl.arange(0, M)).to(tl.int64), tile * N + tl.arange(0, N), tl.arange(0, K)
        real = r < tl.load(ends_ptr + expert)
        w_at = w2_ptr + expert.to(tl.int64) * (D * SIZE) + tl.where(n < D, n, 0)[:, None] * SIZE
        scales_at = w_scales_ptr + (expert.to(tl.int64) * (D // 128) + tile * N // 128) * groups
        y = tl.zeros([M, N], tl.float32)
        scale, w_scale = tl.zeros([M], tl.float32), 0.0
        if FP8:
            w_scale = tl.load(scales_at)
        for k0 in tl.range(0, SIZE, K, num_stages=STAGES):
            k = (k0 + col)[None, :]
            if FP8:
                next_w_scale = tl.load(scales_at + tl.minimum(k0 // 128 + 1, groups - 1))
            h = tl.load(h_ptr + r[:, None] * SIZE + k, mask=real[:, None] & (k < SIZE), other=0.0)
            w = tl.load(w_at + k, mask=k < SIZE, other=0.0)
            if FP8:
                scale = tl.load(h_scales_ptr + k0 // 128 * stride_h_scale + r, mask=real, other=0.0)
            y = _add_product(y, h, w, scale * w_scale, FP8)
            if FP8:
                w_scale = next_w_scale
        go_ahead(PDL)
        tl.store(y_ptr + r[:, None] * D + n[None, :], y, mask=real[:, None] & (n < D)[None, :])


def moe_experts(
    x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Tensor | Fp8, w2: Tensor | Fp8, first_expert: int,
    *, shared_expert: bool = False, num_experts: int = 0,
) -> Tensor:  # fmt: skip
    num_held, _, size = (w2.data if isinstance(w2, Fp8) else w2).shape
    rows = expected_rows(experts.shape[0], experts.shape[1], num_experts or num_held - shared_expert)
    chosen = config(rows, num_held, size)
    return run(x, weights, experts, w13, w2, first_expert, shared_expert=shared_expert, config=chosen)


moe_experts_fp8 = moe_experts


def run(
    x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Tensor | Fp8, w2: Tensor | Fp8, first_expert: int,
    *, shared_expert: bool, config: Config,
) -> Tensor:  # fmt: skip
    rows, dtype = _rows(x, w13)
    num_held = (w13.data if isinstance(w13, Fp8) else w13).shape[0]
    out = torch.empty(rows.data.shape, dtype=dtype, device=rows.data.device)
    for first, last in slices(experts.shape[0], experts.shape[1] + shared_expert):
        chosen, part = experts[first:last], Fp8(rows.data[first:last], rows.scales[first:last])
        gathered = config.up.programs > 0 and isinstance(w13, Fp8)
        plan, blocks = route(
            chosen, first_expert, num_held, shared_expert, config.block_m, granularity=config.block_m,
            scales=part.scales if gathered else None,
        )  # fmt: skip
        assert blocks is not None
        h = gate_up(part, w13, plan, blocks, config.block_m, config.up)
        combine(down(h, w2, plan, blocks, config.block_m, config.down), plan, weights[first:last], out[first:last])
    return out


def _rows(x: Tensor | Operand, w13: Tensor | Fp8) -> tuple[Fp8, torch.dtype]:
    """The rows as the weights want them (plain ones have any tensor in the place of scales), and the sum's dtype."""
    plain, fp8 = x if isinstance(x, Operand) else (x, None)
    if not isinstance(w13, Fp8):
        assert plain is not None, "plain weights need plain rows"
        return Fp8(plain, plain), plain.dtype
    if fp8 is None:
        assert plain is not None, "an operand without any form"
        fp8 = quant_groups(plain)
    return fp8, torch.bfloat16 if plain is None else plain.dtype


def gate_up(x: Fp8, w13: Tensor | Fp8, plan: Route, blocks: Blocks, block_m: int, chosen: Launch) -> Fp8:
    """h [num_rows, I], plain or in FP8 with its scales column by column. `programs` reads blocks.scales."""
    if chosen.programs and isinstance(w13, Fp8):
        return moe_persistent.gate_up(x, w13, plan, blocks, block_m, chosen)
    fp8, (data, scales) = isinstance(w13, Fp8), _parts(w13)
    _, width, dim = data.shape
    rows, size = plan.num_rows, width // 2
    assert x.data.dtype == data.dtype and x.data.stride(1) == 1, (x.data.dtype, data.dtype)
    h = torch.empty(rows, size, dtype=data.dtype, device=x.data.device)
    h_scales = torch.empty(triton.cdiv(size, BLOCK), rows if fp8 else 0, dtype=torch.float32, device=x.data.device)
    _gate_up_kernel[(rows // block_m * triton.cdiv(size, BLOCK),)](
        x.data, x.scales, data, scales, h, h_scales, blocks.tokens, blocks.experts, plan.ends, plan.total,
        x.data.stride(0), *x.scales.stride(), rows,
        dim, size, block_m, BLOCK, BLOCK // data.element_size(), chosen.stages, fp8, **options(chosen.warps),
    )  # fmt: skip
    return Fp8(h, h_scales.t())


def down(h: Fp8, w2: Tensor | Fp8, plan: Route, blocks: Blocks, block_m: int, chosen: Launch) -> Tensor:
    """y [num_rows, D], in bfloat16 or the plain weights' dtype."""
    if chosen.programs and isinstance(w2, Fp8):
        return moe_persistent.down(h, w2, plan, blocks, block_m, chosen)
    fp8, (data, scales) = isinstance(w2, Fp8), _parts(w2)
    _, dim, size = data.shape
    y = torch.empty(plan.num_rows, dim, dtype=torch.bfloat16 if fp8 else data.dtype, device=data.device)
    _down_kernel[(plan.num_rows // block_m * triton.cdiv(dim, chosen.block_n),)](
        h.data, h.scales, data, scales, y, blocks.experts, plan.ends, plan.total, plan.num_rows,
        dim, size, block_m, chosen.block_n, BLOCK // data.element_size(), chosen.stages, fp8, **options(chosen.warps),
    )  # fmt: skip
    return y


def _parts(weight: Tensor | Fp8) -> Fp8:
    data, scales = weight if isinstance(weight, Fp8) else (weight, weight)
    assert data.is_contiguous() and scales.is_contiguous(), (data.stride(), scales.stride())
    return Fp8(data, scales)
