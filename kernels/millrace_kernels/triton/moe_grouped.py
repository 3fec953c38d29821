"""Experts as two grouped GEMMs of our own that gather their rows by themselves: plain weights, or FP8 times FP8.

    h[r] = silu_mul(w13_e x[token of r])   y[r] = w2_e h[r]   for the rows r of expert e      out_t = sum of weight * y

SwiGLU, and with FP8 the quantisation of h, happen where the first GEMM ends, so gate_up is never written. For plain
weights this is the one implementation for many tokens; for FP8 it serves where a few rows per expert leave DeepGEMM's
tiles empty, where sparing its copies was measured to be worth more than its speed, and where DeepGEMM is missing.

With few rows the weight is better the left operand (`left`): wgmma takes 64 of its rows at a time and as many tokens as
there are, and TMA brings it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import BLOCK, Fp8, Operand, quant_groups
from millrace_kernels.gpu import fitting
from millrace_kernels.moe_experts import expected_rows
from millrace_kernels.triton.moe_route import Blocks, ExpertRoute, route, slices
from millrace_kernels.triton.moe_rows import combine
from millrace_kernels.triton.quant import quantise
from millrace_kernels.tuned import Table


class Launch(NamedTuple):
    """One of the two launches: 128 bytes of the terms at a time, `stages` of them in flight."""

    warps: int
    stages: int
    block_n: int = BLOCK  # columns of a program; of w13's always 128, one group of the quantised h
    left: bool = False  # FP8 weights as the left operand, of LEFT_ROWS rows or more


class MoeGroupedConfig(NamedTuple):
    block_m: int  # rows of a program
    up: Launch
    down: Launch


def _both(block_m: int, block_n: int, warps: int, stages: int) -> MoeGroupedConfig:
    return MoeGroupedConfig(block_m, Launch(warps, stages), Launch(warps, stages, block_n))


# By the expected rows of an expert up to which they hold.
CONFIGS = {
    16: _both(16, 64, 4, 4),
    32: _both(32, 128, 8, 3),
    64: _both(64, 128, 8, 3),
    1 << 30: _both(128, 128, 8, 3),
}
LEFT_ROWS = 32  # of a program: their scales are a tile of TMA, which begins at a multiple of 128 bytes

# (expected rows of an expert, E, I) -> the fastest, where it beats DeepGEMM with its further kernels
MEASURED = Table("moe_grouped", MoeGroupedConfig)
LEAST_WORK = 1280  # tokens times I, from which on these are faster than the kernels for few tokens (moe_small)


def config(rows: int, num_held: int, size: int) -> MoeGroupedConfig:
    return MEASURED.get(rows, num_held, size) or _estimate(rows)


def _estimate(rows: int) -> MoeGroupedConfig:
    chosen = CONFIGS[min(most for most in CONFIGS if rows <= most)]
    up = fitting(chosen.up.stages, (chosen.block_m + 2 * BLOCK) * BLOCK)
    down = fitting(chosen.down.stages, (chosen.block_m + chosen.down.block_n) * BLOCK)
    return chosen._replace(up=chosen.up._replace(stages=up), down=chosen.down._replace(stages=down))


def is_fastest(num_tokens: int, shape: tuple[int, ...]) -> bool:
    """Whether this is the fastest kernel for FP8 experts w2 [E, D, I]; shape: (E, D, I, expected rows)."""
    num_held, _, size, rows = shape
    if num_tokens <= SMALL_TOKENS:
        return num_tokens * size >= LEAST_WORK
    return MEASURED.get(rows, num_held, size) is not None


@triton.jit
def _add_product(total, x, w, scale, FP8: tl.constexpr, LEFT: tl.constexpr):
    """total [M, N] + x [M, K] times w [N, K], with FP8 by scale [M]; with LEFT all of it transposed."""
    if LEFT:
        total += tl.dot(w, tl.trans(x)) * scale[None, :]
    elif FP8:
        total += tl.dot(x, tl.trans(w)) * scale[:, None]
    else:
        total = tl.dot(x, tl.trans(w), total)
    return total


@triton.jit(do_not_specialize=["stride_scale_k"])
def _gate_up_kernel(
    x_ptr, x_scales, w13, w_scales_ptr, h_ptr, h_scales_ptr, tokens_ptr, blocks_ptr, ends_ptr, total_ptr,
    stride_x, stride_scale_t, stride_scale_k, stride_h_scale,
    D: tl.constexpr, SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """x_scales, of tokens, and w13 are pointers, with LEFT descriptors: of columns [1, M] of the rows' scales, and of
    tiles [N, K] of the experts on top of each other. Unused rows then keep their content.
    """
    tiles: tl.constexpr = (SIZE + N - 1) // N
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if block * M < tl.load(total_ptr):
        expert = tl.load(blocks_ptr + block)
        r, n, col = block * M + tl.arange(0, M), tile * N + tl.arange(0, N), tl.arange(0, K)
        real = r < tl.load(ends_ptr + expert)
        token = tl.load(tokens_ptr + r, mask=real, other=0).to(tl.int64)
        x_at, first_row = x_ptr + token[:, None] * stride_x, expert * (2 * SIZE) + tile * N
        scales_at = w_scales_ptr + (expert.to(tl.int64) * (2 * SIZE // 128) + tile * N // 128) * (D // 128)
        gate = tl.zeros([N, M] if LEFT else [M, N], tl.float32)
        up = gate
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
            if LEFT:
                scale = tl.reshape(x_scales.load([k0 // 128, block * M]), [M])
                w_gate, w_up = w13.load([first_row, k0]), w13.load([first_row + SIZE, k0])
            else:
                w_at = w13 + expert.to(tl.int64) * (2 * SIZE * D) + tl.where(n < SIZE, n, 0)[:, None] * D
                w_gate = tl.load(w_at + k, mask=k < D, other=0.0)
                w_up = tl.load(w_at + SIZE * D + k, mask=k < D, other=0.0)
                if FP8:
                    at = x_scales + token * stride_scale_t + k0 // 128 * stride_scale_k
                    scale = tl.load(at, mask=real, other=0.0)
            gate = _add_product(gate, x, w_gate, scale * gate_scale, FP8, LEFT)
            up = _add_product(up, x, w_up, scale * up_scale, FP8, LEFT)
            if FP8:
                gate_scale, up_scale = next_gate_scale, next_up_scale
        h = gate * tl.sigmoid(gate) * up
        h = tl.trans(h) if LEFT else h
        at, mask = h_ptr + r.to(tl.int64)[:, None] * SIZE + n[None, :], real[:, None] & (n < SIZE)[None, :]
        if FP8:
            h8, h_scale = quantise(h)
            tl.store(at, h8, mask=mask)
            tl.store(h_scales_ptr + tile * stride_h_scale + r, h_scale, mask=real)
        else:
            tl.store(at, h, mask=mask)


@triton.jit
def _down_kernel(
    h, h_scales, w2, w_scales_ptr, y_ptr, blocks_ptr, ends_ptr, total_ptr, stride_h_scale,
    D: tl.constexpr, SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """h, h_scales and w2 are pointers, with LEFT descriptors: of tiles [M, K], of columns [1, M], and of tiles [N, K]
    of the experts on top of each other. Unused rows then keep their content.
    """
    tiles: tl.constexpr = (D + N - 1) // N
    groups: tl.constexpr = SIZE // 128
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if block * M < tl.load(total_ptr):
        expert = tl.load(blocks_ptr + block)
        r, n, col = (block * M + tl.arange(0, M)).to(tl.int64), tile * N + tl.arange(0, N), tl.arange(0, K)
        real = r < tl.load(ends_ptr + expert)
        scales_at = w_scales_ptr + (expert.to(tl.int64) * (D // 128) + tile * N // 128) * groups
        y = tl.zeros([N, M] if LEFT else [M, N], tl.float32)
        scale, w_scale = tl.zeros([M], tl.float32), 0.0
        if FP8:
            w_scale = tl.load(scales_at)
        for k0 in tl.range(0, SIZE, K, num_stages=STAGES):
            if FP8:
                next_w_scale = tl.load(scales_at + tl.minimum(k0 // 128 + 1, groups - 1))
            if LEFT:
                scale = tl.reshape(h_scales.load([k0 // 128, block * M]), [M])
                rows, w = h.load([block * M, k0]), w2.load([expert * D + tile * N, k0])
            else:
                k = (k0 + col)[None, :]
                w_at = w2 + expert.to(tl.int64) * (D * SIZE) + tl.where(n < D, n, 0)[:, None] * SIZE
                rows = tl.load(h + r[:, None] * SIZE + k, mask=real[:, None] & (k < SIZE), other=0.0)
                w = tl.load(w_at + k, mask=k < SIZE, other=0.0)
                if FP8:
                    scale = tl.load(h_scales + k0 // 128 * stride_h_scale + r, mask=real, other=0.0)
            y = _add_product(y, rows, w, scale * w_scale, FP8, LEFT)
            if FP8:
                w_scale = next_w_scale
        y = tl.trans(y) if LEFT else y
        tl.store(y_ptr + r[:, None] * D + n[None, :], y, mask=real[:, None] & (n < D)[None, :])


def moe_experts(
    x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Tensor | Fp8, w2: Tensor | Fp8,
    *, shared_expert: bool = False, num_experts: int = 0, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    num_held, _, size = (w2.data if isinstance(w2, Fp8) else w2).shape
    rows = expected_rows(experts.shape[0], experts.shape[1], num_experts or num_held - shared_expert)
    chosen = config(rows, num_held, size)
    return run(x, weights, experts, w13, w2, shared_expert=shared_expert, config=chosen, out=out)


moe_experts_fp8 = moe_experts


def run(
    x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Tensor | Fp8, w2: Tensor | Fp8,
    *, shared_expert: bool, config: MoeGroupedConfig, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows, dtype = rows_for(x, w13)
    num_held = (w13.data if isinstance(w13, Fp8) else w13).shape[0]
    out = torch.empty(rows.data.shape, dtype=dtype, device=rows.data.device) if out is None else out
    for first, last in slices(experts.shape[0], experts.shape[1] + shared_expert):
        chosen, part = experts[first:last], Fp8(rows.data[first:last], rows.scales[first:last])
        left = config.up.left and isinstance(w13, Fp8)
        scales = part.scales if left else None
        plan, blocks = route(chosen, num_held, shared_expert, config.block_m, scales)
        h = gate_up(part, w13, plan, blocks, config.block_m, config.up)
        combine(down(h, w2, plan, blocks, config.block_m, config.down), plan, weights[first:last], out[first:last])
    return out


def rows_for(x: Tensor | Operand, w13: Tensor | Fp8) -> tuple[Fp8, torch.dtype]:
    """The rows as the weights want them (plain ones have any tensor in the place of scales), and the sum's dtype."""
    plain, fp8 = x if isinstance(x, Operand) else (x, None)
    if not isinstance(w13, Fp8):
        assert plain is not None, "plain weights need plain rows"
        return Fp8(plain, plain), plain.dtype
    if fp8 is None:
        assert plain is not None, "an operand without any form"
        fp8 = quant_groups(plain)
    return fp8, torch.bfloat16 if plain is None else plain.dtype


def gate_up(x: Fp8, w13: Tensor | Fp8, plan: ExpertRoute, blocks: Blocks, block_m: int, chosen: Launch) -> Fp8:
    """h [num_rows, I], plain or in FP8 with its scales column by column. blocks.scales are there for `left` in FP8."""
    fp8, (data, scales) = isinstance(w13, Fp8), _parts(w13)
    _, width, dim = data.shape
    rows, size, left = plan.num_rows, width // 2, blocks.scales is not None
    assert x.data.dtype == data.dtype and x.data.stride(1) == 1, (x.data.dtype, data.dtype)
    h = torch.empty(rows, size, dtype=data.dtype, device=x.data.device)
    h_scales = torch.empty(triton.cdiv(size, BLOCK), rows if fp8 else 0, dtype=torch.float32, device=x.data.device)
    _gate_up_kernel[(rows // block_m * triton.cdiv(size, BLOCK),)](
        x.data, x.scales if blocks.scales is None else _columns(blocks.scales, block_m),
        _tiles(data.flatten(0, 1), BLOCK) if left else data, scales, h, h_scales,
        blocks.tokens, blocks.experts, plan.ends, plan.total, x.data.stride(0), *x.scales.stride(), rows,
        dim, size, block_m, BLOCK, BLOCK // data.element_size(), chosen.stages, fp8, left, num_warps=chosen.warps,
    )  # fmt: skip
    return Fp8(h, h_scales.t())


def down(h: Fp8, w2: Tensor | Fp8, plan: ExpertRoute, blocks: Blocks, block_m: int, chosen: Launch) -> Tensor:
    """y [num_rows, D], in bfloat16 or the plain weights' dtype."""
    fp8, (data, scales) = isinstance(w2, Fp8), _parts(w2)
    _, dim, size = data.shape
    rows, left = plan.num_rows, chosen.left and fp8
    y = torch.empty(rows, dim, dtype=torch.bfloat16 if fp8 else data.dtype, device=data.device)
    _down_kernel[(rows // block_m * triton.cdiv(dim, chosen.block_n),)](
        _tiles(h.data, block_m) if left else h.data, _columns(h.scales.t(), block_m) if left else h.scales,
        _tiles(data.flatten(0, 1), chosen.block_n) if left else data, scales, y,
        blocks.experts, plan.ends, plan.total, rows, dim, size, block_m, chosen.block_n, BLOCK // data.element_size(),
        chosen.stages, fp8, left, num_warps=chosen.warps,
    )  # fmt: skip
    return y


def _parts(weight: Tensor | Fp8) -> Fp8:
    data, scales = weight if isinstance(weight, Fp8) else (weight, weight)
    assert data.is_contiguous() and scales.is_contiguous(), (data.stride(), scales.stride())
    return Fp8(data, scales)


def _columns(scales: Tensor, block_m: int) -> TensorDescriptor:
    """Tiles of float32 [K/128, num_rows]."""
    assert block_m >= LEFT_ROWS, f"block_m {block_m}: with the weight as left operand {LEFT_ROWS} or more"
    return _tiles(scales, 1, block_m)


def _tiles(matrix: Tensor, rows: int, columns: int = BLOCK) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns])
