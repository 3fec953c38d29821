"""INT8 product on the tensor cores, and the quantisation of rows: one program a row, which it reads once.

The weight is the left operand, as in `fp8_linear`: wgmma takes 64 of its rows at a time, and as many tokens as there
are. Sums are INT32, so no order of K changes a result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.int8 import Int8


class Config(NamedTuple):
    block_m: int  # tokens
    block_n: int  # rows of the weight
    warps: int
    stages: int


# By the tokens up to which they hold. Not measured.
CONFIGS = {
    16: Config(16, 64, 4, 5),
    64: Config(64, 64, 4, 5),
    256: Config(128, 64, 4, 4),
    1 << 62: Config(128, 128, 8, 4),
}
BLOCK_K = 128
GROUP = 8  # tiles of tokens that share rows of the weight while those are in the L2 cache


@triton.jit
def _quant_rows(x, data, scales, width, x_stride, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDTH)
    values = tl.load(x + row * x_stride + cols, cols < width, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=0)
    scale = tl.where(largest > 0, tl.div_rn(largest, 127.0), 1.0)
    scaled = tl.div_rn(values, tl.broadcast_to(scale, values.shape))
    nearest = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2^23: float32 has no fraction there
    tl.store(data + row * width + cols, nearest.to(tl.int8), cols < width)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["num_tokens"])
def _int8_linear(
    x, x_scales, weight, w_scales, out, num_tokens, n, k, x_stride, weight_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tile_m, tile_n = tl.swizzle2d(tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n, tiles_m, tiles_n, GROUP)
    tokens, rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    some, held, at = tokens < num_tokens, rows < n, tl.arange(0, BLOCK_K)
    x_at, w_at = x + tokens.to(tl.int64)[:, None] * x_stride, weight + rows.to(tl.int64)[:, None] * weight_stride
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    for first in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        inside = (first + at < k)[None, :]
        inputs = tl.load(x_at + first + at[None, :], some[:, None] & inside, other=0)
        values = tl.load(w_at + first + at[None, :], held[:, None] & inside, other=0)
        total = tl.dot(values, tl.trans(inputs), total, out_dtype=tl.int32)
    x_scale = tl.load(x_scales + tokens, some, other=0.0)
    w_scale = tl.load(w_scales + rows, held, other=0.0)
    result = tl.trans(total.to(tl.float32) * w_scale[:, None] * x_scale[None, :])
    at_out = tokens.to(tl.int64)[:, None] * n + rows[None, :]
    tl.store(out + at_out, result.to(out.dtype.element_ty), some[:, None] & held[None, :])


def quant_rows(x: Tensor) -> Int8:
    assert x.stride(1) == 1, x.stride()
    num_tokens, width = x.shape
    data = torch.empty(num_tokens, width, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    if num_tokens:
        padded = triton.next_power_of_2(width)
        warps = max(1, min(16, padded // 1024))
        _quant_rows[(num_tokens,)](x, data, scales, width, x.stride(0), WIDTH=padded, num_warps=warps)
    return Int8(data, scales)


def int8_linear(x: Int8, weight: Int8, dtype: torch.dtype) -> Tensor:
    return int8_linear_with(x, weight, dtype, CONFIGS[min(most for most in CONFIGS if x.data.shape[0] <= most)])


def int8_linear_with(x: Int8, weight: Int8, dtype: torch.dtype, chosen: Config) -> Tensor:
    (num_tokens, k), n = x.data.shape, weight.data.shape[0]
    assert x.data.stride(1) == weight.data.stride(1) == 1, (x.data.stride(), weight.data.stride())
    out = torch.empty(num_tokens, n, dtype=dtype, device=x.data.device)
    if num_tokens:
        _int8_linear[(triton.cdiv(num_tokens, chosen.block_m) * triton.cdiv(n, chosen.block_n),)](
            x.data, x.scales, weight.data, weight.scales, out, num_tokens, n, k, x.data.stride(0),
            weight.data.stride(0), BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n, BLOCK_K=BLOCK_K, GROUP=GROUP,
            STAGES=chosen.stages, num_warps=chosen.warps,
        )  # fmt: skip
    return out
