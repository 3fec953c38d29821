"""The experts' FP8 products by a persistent kernel: every SM streams weights without a pause.

    a = x w_e[rows]^T   b = x w_e[others]^T      SwiGLU of w13's gate and up rows: h = silu(a) b, quantised, stored
                                                 w2: 128 rows, or 256 whose two halves share a tile of h, y = (a, b)

With few rows an expert, time is what reading its weights takes. A tile is one block of M rows and 128 columns of h, or
128 or 256 of y, and a fixed grid walks over all tiles. The loop over them and the one over terms are compiled into one
(`flatten`), so the loads of the next tile are under way while this one ends. Weights and the rows' scales come by TMA;
rows are gathered by asynchronous copies that leave out what is not there. wgmma's left operand has 64 rows: those of x
where a block has as many, which makes the scaling cheaper, else the weight's, and all of it is transposed.

Tiles are walked from the last block down. The last expert is the shared one, whose blocks run side by side and so find
each other's weights in the L2 cache; and the programs that have one tile more than others begin with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from millrace_kernels.fp8 import BLOCK, Fp8
from millrace_kernels.gpu import sms
from millrace_kernels.triton.launch import go_ahead, options, wait
from millrace_kernels.triton.moe_route import Blocks, Route
from millrace_kernels.triton.quant import quantise

if TYPE_CHECKING:
    from millrace_kernels.triton.moe_grouped import Launch

LEAST_ROWS = 32  # of a block: its scales, a tile of TMA, begin at multiples of 128 bytes


@triton.jit
def _add_product(total, x, w, scale):
    """total [M, N] + x [M, K] times w [N, K] by scale [M], or [N, M] for fewer than 64 rows."""
    if x.shape[0] < 64:
        total += tl.dot(w, tl.trans(x)) * scale[None, :]
    else:
        total += tl.dot(x, tl.trans(w)) * scale[:, None]
    return total


@triton.jit
def _rows(total):
    """[M, 128], whichever operand was on the left."""
    return tl.trans(total) if total.shape[1] < 64 else total


@triton.jit
def _persistent_kernel(
    x_ptr, x_scales, w, w_scales_ptr, out_ptr, out_scales_ptr, tokens_ptr, blocks_ptr, ends_ptr, total_ptr,
    stride_x, stride_out_scale,
    TERMS: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    SWIGLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x_scales and w are descriptors: of columns [1, M] of the rows' scales, and of tiles [128, 128] of the experts on
    top of each other. With SWIGLU row r is token tokens[r] of x, else row r of x. What rows of nobody hold stays in
    them.
    """
    groups: tl.constexpr = TERMS // 128
    tiles: tl.constexpr = WIDTH // COLUMNS
    two: tl.constexpr = SWIGLU or COLUMNS == 256
    apart: tl.constexpr = WIDTH if SWIGLU else 128  # from the weight's rows of one product to those of the other
    expert_rows: tl.constexpr = 2 * WIDTH if SWIGLU else WIDTH
    wait(PDL)
    go_ahead(PDL)
    blocks = tl.load(total_ptr) // M
    for item in tl.range(tl.program_id(0), blocks * tiles, tl.num_programs(0), flatten=True):
        block, tile = blocks - 1 - item // tiles, item % tiles
        expert = tl.load(blocks_ptr + block)
        r, col = block * M + tl.arange(0, M), tl.arange(0, 128)
        real = r < tl.load(ends_ptr + expert)
        from_row = tl.load(tokens_ptr + r, mask=real, other=0) if SWIGLU else r
        x_at = x_ptr + from_row.to(tl.int64)[:, None] * stride_x + col[None, :]
        w_row = expert * expert_rows + tile * COLUMNS
        a_scales = w_scales_ptr + (w_row // 128).to(tl.int64) * groups
        b_scales = a_scales + (apart // 128 * groups if two else 0)
        a_scale, b_scale = tl.load(a_scales), tl.load(b_scales)
        a = tl.zeros([128, M] if M < 64 else [M, 128], tl.float32)
        b = a
        for g in tl.range(0, groups, num_stages=STAGES):
            after = tl.minimum(g + 1, groups - 1)  # scalars are not pipelined
            next_a_scale, next_b_scale = tl.load(a_scales + after), tl.load(b_scales + after)
            x = tl.load(x_at + g * 128, mask=real[:, None], other=0.0)
            scale = tl.reshape(x_scales.load([g, block * M]), [M])
            a = _add_product(a, x, w.load([w_row, g * 128]), scale * a_scale)
            if two:
                b = _add_product(b, x, w.load([w_row + apart, g * 128]), scale * b_scale)
            a_scale, b_scale = next_a_scale, next_b_scale
        at = out_ptr + r.to(tl.int64)[:, None] * WIDTH + (tile * COLUMNS + col)[None, :]
        if SWIGLU:
            h, h_scale = quantise(_rows(a * tl.sigmoid(a) * b))
            tl.store(at, h, mask=real[:, None])
            tl.store(out_scales_ptr + tile * stride_out_scale + r, h_scale, mask=real)
        else:
            tl.store(at, _rows(a), mask=real[:, None])
            if two:
                tl.store(at + 128, _rows(b), mask=real[:, None])


def gate_up(x: Fp8, w13: Fp8, plan: Route, blocks: Blocks, block_m: int, chosen: Launch) -> Fp8:
    """h [num_rows, I] with its scales column by column; blocks.scales are those of the rows."""
    assert blocks.scales is not None and chosen.block_n == BLOCK, "the rows' scales, and one group of h at a time"
    rows, size = plan.num_rows, w13.data.shape[1] // 2
    h = torch.empty(rows, size, dtype=w13.data.dtype, device=x.data.device)
    h_scales = torch.empty(triton.cdiv(size, BLOCK), rows, dtype=torch.float32, device=x.data.device)
    _launch(x.data, blocks.scales, w13, h, h_scales, plan, blocks, block_m, chosen)
    return Fp8(h, h_scales.t())


def down(h: Fp8, w2: Fp8, plan: Route, blocks: Blocks, block_m: int, chosen: Launch) -> Tensor:
    """y bfloat16 [num_rows, D]"""
    y = torch.empty(plan.num_rows, w2.data.shape[1], dtype=torch.bfloat16, device=h.data.device)
    _launch(h.data, h.scales.t(), w2, y, None, plan, blocks, block_m, chosen)
    return y


def _launch(
    x: Tensor, x_scales: Tensor, w: Fp8, out: Tensor, out_scales: Tensor | None, plan: Route, blocks: Blocks,
    block_m: int, chosen: Launch,
) -> None:  # fmt: skip
    (rows, width), terms, columns = out.shape, x.shape[1], chosen.block_n
    assert block_m >= LEAST_ROWS, f"block_m {block_m}: the persistent kernel takes {LEAST_ROWS} rows or more"
    assert columns in (128, 256) and width % columns == 0, f"block_n {columns}: 128 or 256, a divisor of {width}"
    assert x.dtype == w.data.dtype and x.stride(1) == 1, (x.dtype, w.data.dtype, x.stride())
    assert w.data.is_contiguous() and w.scales.is_contiguous(), (w.data.stride(), w.scales.stride())
    _persistent_kernel[(min(chosen.programs * sms(), rows // block_m * (width // columns)),)](
        x, TensorDescriptor.from_tensor(x_scales, [1, block_m]),
        TensorDescriptor.from_tensor(w.data.flatten(0, 1), [BLOCK, BLOCK]), w.scales, out, out_scales,
        blocks.tokens, blocks.experts, plan.ends, plan.total, x.stride(0), rows,
        terms, width, block_m, columns, chosen.stages, out_scales is not None, **options(chosen.warps),
    )  # fmt: skip
