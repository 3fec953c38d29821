"""Experts as two grouped GEMMs of our own that gather their rows by themselves: plain weights, or FP8 times FP8.

    h[r] = silu_mul(w13_e x[token of r])   y[r] = w2_e h[r]   for the rows r of expert e      out_t = sum of weight * y

SwiGLU, and with FP8 the quantisation of h, happen where the first GEMM ends, so gate_up is never written. For plain
weights this is the one implementation for many tokens; for FP8 it serves where a few rows per expert leave DeepGEMM's
tiles of 64 rows empty, and where DeepGEMM is missing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, Fp8, Operand, quant_groups
from millrace_kernels.triton.launch import go_ahead, options, wait
from millrace_kernels.triton.moe_route import Blocks, Route, expected_rows, route, slices
from millrace_kernels.triton.moe_rows import combine
from millrace_kernels.triton.quant import quantise


class Config(NamedTuple):
    """Of both launches: a program makes block_m rows and block_n columns, 128 bytes of their terms at a time."""

    block_m: int
    block_n: int  # of w2; w13's is 128, one group of the quantised h
    num_warps: int
    num_stages: int


# By the expected rows of an expert up to which they hold; millrace_bench.kernels.tune_moe times others.
CONFIGS = {
    16: Config(16, 64, 4, 4),
    32: Config(32, 128, 8, 3),
    64: Config(64, 128, 8, 3),
    1 << 30: Config(128, 128, 8, 3),
}


@triton.jit
def _gate_up_kernel(
    x_ptr, x_scales_ptr, w13_ptr, w_scales_ptr, h_ptr, h_scales_ptr, tokens_ptr, blocks_ptr, ends_ptr, total_ptr,
    stride_x, stride_scale_t, stride_scale_k,
    D: tl.constexpr, SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (SIZE + N - 1) // N
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    wait(PDL)
    if block * M < tl.load(total_ptr):
        expert = tl.load(blocks_ptr + block).to(tl.int64)
        r, n, col = block * M + tl.arange(0, M), tile * N + tl.arange(0, N), tl.arange(0, K)
        real = r < tl.load(ends_ptr + expert)
        token = tl.load(tokens_ptr + r, mask=real, other=0).to(tl.int64)
        row = tl.where(n < SIZE, n, 0)
        x_at, w_at = x_ptr + token[:, None] * stride_x, w13_ptr + expert * (2 * SIZE * D) + row[:, None] * D
        scales_at = w_scales_ptr + (expert * (2 * SIZE // 128) + tile * N // 128) * (D // 128)
        gate, up = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
        for k0 in tl.range(0, D, K, num_stages=STAGES):
            k = (k0 + col)[None, :]
            x = tl.load(x_at + k, mask=real[:, None] & (k < D), other=0.0)
            w_gate = tl.trans(tl.load(w_at + k, mask=k < D, other=0.0))
            w_up = tl.trans(tl.load(w_at + SIZE * D + k, mask=k < D, other=0.0))
            if FP8:
                at = x_scales_ptr + token * stride_scale_t + k0 // 128 * stride_scale_k
                scale = tl.load(at, mask=real, other=0.0)
                gate_scale = tl.load(scales_at + k0 // 128)
                up_scale = tl.load(scales_at + SIZE // 128 * (D // 128) + k0 // 128)
                gate += tl.dot(x, w_gate) * (scale * gate_scale)[:, None]
                up += tl.dot(x, w_up) * (scale * up_scale)[:, None]
            else:
                gate = tl.dot(x, w_gate, gate)
                up = tl.dot(x, w_up, up)
        go_ahead(PDL)
        h = gate * tl.sigmoid(gate) * up
        at, mask = h_ptr + r.to(tl.int64)[:, None] * SIZE + n[None, :], real[:, None] & (n < SIZE)[None, :]
        if FP8:
            h8, h_scale = quantise(h)
            tl.store(at, h8, mask=mask)
            tl.store(h_scales_ptr + r.to(tl.int64) * tiles + tile, h_scale, mask=real)
        else:
            tl.store(at, h, mask=mask)


@triton.jit
def _down_kernel(
    h_ptr, h_scales_ptr, w2_ptr, w_scales_ptr, y_ptr, blocks_ptr, ends_ptr, total_ptr,
    D: tl.constexpr, SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (D + N - 1) // N
    groups: tl.constexpr = SIZE // 128
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    wait(PDL)
    if block * M < tl.load(total_ptr):
        expert = tl.load(blocks_ptr + block).to(tl.int64)
        r, n, col = (block * M + tl.arange(0, M)).to(tl.int64), tile * N + tl.arange(0, N), tl.arange(0, K)
        real = r < tl.load(ends_ptr + expert)
        row = tl.where(n < D, n, 0)
        h_at, w_at = h_ptr + r[:, None] * SIZE, w2_ptr + expert * (D * SIZE) + row[:, None] * SIZE
        scales_at = w_scales_ptr + (expert * (D // 128) + tile * N // 128) * groups
        y = tl.zeros([M, N], tl.float32)
        for k0 in tl.range(0, SIZE, K, num_stages=STAGES):
            k = (k0 + col)[None, :]
            h = tl.load(h_at + k, mask=real[:, None] & (k < SIZE), other=0.0)
            w = tl.trans(tl.load(w_at + k, mask=k < SIZE, other=0.0))
            if FP8:
                scale = tl.load(h_scales_ptr + r * groups + k0 // 128, mask=real, other=0.0)
                y += tl.dot(h, w) * (scale * tl.load(scales_at + k0 // 128))[:, None]
            else:
                y = tl.dot(h, w, y)
        go_ahead(PDL)
        tl.store(y_ptr + r[:, None] * D + n[None, :], y, mask=real[:, None] & (n < D)[None, :])


def moe_experts(
    x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Tensor | Fp8, w2: Tensor | Fp8, first_expert: int,
    *, shared_expert: bool = False, num_experts: int = 0,
) -> Tensor:  # fmt: skip
    num_held = (w13.data if isinstance(w13, Fp8) else w13).shape[0]
    rows = expected_rows(experts.shape[0], experts.shape[1], num_experts or num_held - shared_expert)
    return run(x, weights, experts, w13, w2, first_expert, shared_expert, config(rows))


moe_experts_fp8 = moe_experts

MEASURED_SIZES = (
    256,
)  # of an expert here: TP8's, 8 to 32 tokens: 108-269 us, DeepGEMM 158-328, few-token kernels 120-671


def is_measured(num_tokens: int, shape: tuple[int, ...]) -> bool:
    """Whether this is the fastest for experts w2 of that shape [E, D, I], within the table's limits of num_tokens."""
    return shape[2] in MEASURED_SIZES


def config(rows: int) -> Config:
    """For so many expected rows of an expert."""
    return CONFIGS[min(most for most in CONFIGS if rows <= most)]


def run(
    x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Tensor | Fp8, w2: Tensor | Fp8, first_expert: int,
    shared_expert: bool, config: Config,
) -> Tensor:  # fmt: skip
    plain, fp8 = x if isinstance(x, Operand) else (x, None)
    if isinstance(w13, Fp8) and fp8 is None:
        assert plain is not None, "an operand without any form"
        fp8 = quant_groups(plain)
    rows = Fp8(plain, plain) if fp8 is None or not isinstance(w13, Fp8) else fp8  # type: ignore[arg-type]
    num_held = (w13.data if isinstance(w13, Fp8) else w13).shape[0]
    dtype = torch.bfloat16 if plain is None else plain.dtype
    out = torch.empty(rows.data.shape, dtype=dtype, device=rows.data.device)
    for first, last in slices(experts.shape[0], experts.shape[1] + shared_expert):
        chosen, part = experts[first:last], Fp8(rows.data[first:last], rows.scales[first:last])
        plan, blocks = route(chosen, first_expert, num_held, shared_expert, config.block_m, granularity=config.block_m)
        assert blocks is not None
        y = _experts(part, w13, w2, plan, blocks, config)
        combine(y, plan, weights[first:last], out[first:last])
    return out


def _experts(x: Fp8, w13: Tensor | Fp8, w2: Tensor | Fp8, plan: Route, blocks: Blocks, config: Config) -> Tensor:
    """-> [num_rows, D], in bfloat16 or the plain weights' dtype."""
    fp8 = isinstance(w13, Fp8)
    w13_data, w13_scales = w13 if isinstance(w13, Fp8) else (w13, w13)
    w2_data, w2_scales = w2 if isinstance(w2, Fp8) else (w2, w2)
    _, dim, size = w2_data.shape
    assert all(tensor.is_contiguous() for tensor in (w13_data, w13_scales, w2_data, w2_scales))
    assert x.data.dtype == w13_data.dtype and x.data.stride(1) == 1, (x.data.dtype, w13_data.dtype)
    rows, m = plan.num_rows, config.block_m
    h = torch.empty(rows, size, dtype=w13_data.dtype, device=x.data.device)
    h_scales = torch.empty(rows if fp8 else 0, triton.cdiv(size, BLOCK), dtype=torch.float32, device=x.data.device)
    y = torch.empty(rows, dim, dtype=torch.bfloat16 if fp8 else w13_data.dtype, device=x.data.device)
    shared = (blocks.experts, plan.ends, plan.total)
    terms, launch = BLOCK // w13_data.element_size(), options(config.num_warps)
    _gate_up_kernel[(rows // m * triton.cdiv(size, BLOCK),)](
        x.data, x.scales, w13_data, w13_scales, h, h_scales, blocks.tokens, *shared,
        x.data.stride(0), *x.scales.stride(), dim, size, m, BLOCK, terms, config.num_stages, fp8, **launch,
    )  # fmt: skip
    _down_kernel[(rows // m * triton.cdiv(dim, config.block_n),)](
        h, h_scales, w2_data, w2_scales, y, *shared, dim, size, m, config.block_n, terms,
        config.num_stages, fp8, **launch,
    )  # fmt: skip
    return y
