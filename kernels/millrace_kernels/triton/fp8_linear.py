"""Dense FP8 product on the tensor cores, for machines without DeepGEMM.

    out_tn = sum over 128-column blocks b of x_scale_tb * w_scale_nb * (sum over k in b of x_tk w_nk)

A program makes a tile [BLOCK_M, 128], whose rows of the weight share one scale per block of columns. Each block's
product is scaled in FP32 before it is added: the tensor cores' own sums are too coarse for all of K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, Fp8
from millrace_kernels.triton.launch import go_ahead, options, wait

GROUP_M = 8  # tiles of rows that share columns of the weight while those are in the L2 cache


@triton.jit
def _fp8_linear(
    x, x_scales, weight, w_scales, out, num_tokens, n, k,
    x_stride, x_scale_row, x_scale_col, weight_stride, w_scale_row, w_scale_col,
    BLOCK_M: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(n, 128)
    tile_m, tile_n = tl.swizzle2d(tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n, tiles_m, tiles_n, GROUP)
    tokens = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tile_n * 128 + tl.arange(0, 128)
    cols = tl.arange(0, 128)
    x_rows = x + tokens[:, None].to(tl.int64) * x_stride
    w_rows = weight + rows[None, :].to(tl.int64) * weight_stride
    total = tl.zeros([BLOCK_M, 128], tl.float32)
    wait(PDL)
    for block in tl.range(0, tl.cdiv(k, 128), num_stages=STAGES):
        at = block * 128 + cols
        inside = at < k
        inputs = tl.load(x_rows + at[None, :], (tokens < num_tokens)[:, None] & inside[None, :], other=0.0)
        values = tl.load(w_rows + at[:, None], inside[:, None] & (rows < n)[None, :], other=0.0)
        scale = tl.load(x_scales + tokens * x_scale_row + block * x_scale_col, tokens < num_tokens, other=0.0)
        scale *= tl.load(w_scales + tile_n * w_scale_row + block * w_scale_col)
        total += tl.dot(inputs, values) * scale[:, None]
    go_ahead(PDL)
    at_out = tokens[:, None].to(tl.int64) * n + rows[None, :]
    tl.store(out + at_out, total.to(out.dtype.element_ty), (tokens < num_tokens)[:, None] & (rows < n)[None, :])


def fp8_linear(x: Fp8, weight: Fp8, dtype: torch.dtype) -> Tensor:
    (num_tokens, k), n = x.data.shape, weight.data.shape[0]
    out = torch.empty(num_tokens, n, dtype=dtype, device=x.data.device)
    if num_tokens:
        block_m = 64 if num_tokens <= 64 else 128
        _fp8_linear[(triton.cdiv(num_tokens, block_m) * triton.cdiv(n, BLOCK),)](
            x.data, x.scales, weight.data, weight.scales, out, num_tokens, n, k,
            x.data.stride(0), *x.scales.stride(), weight.data.stride(0), *weight.scales.stride(),
            BLOCK_M=block_m, GROUP=GROUP_M, STAGES=4, **options(num_warps=4 if block_m == 64 else 8),
        )  # fmt: skip
    return out
