"""One to four rows x [T, K] times rows of a weight, on CUDA cores: the cost is one read of the weight.

    out_tn = sum over runs r of 16 columns of scale_nr * (sum over k in r of x_tk w_nk)

A lane loads 16 bytes of BLOCK_N / (warps along N) rows at once, straight into registers and all of them before it uses
any: the weight does not pass through shared memory, only x does, and a warp's load is 512 bytes of one row. While one
tile of BLOCK_K columns is multiplied, the next is on its way. Everything is FP32 from the weight on.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.fp8 import Fp8
from millrace_kernels.gpu import sms


class Gemv(NamedTuple):
    """A configuration. Best with 512 columns of a tile per warp, as many as its lanes load at once."""

    block_n: int  # divides 128, so that a program's rows share their scales
    block_k: int
    warps: int


def estimate(n: int, k: int) -> Gemv:
    """The largest tile of which at most a quarter lies beyond K; rows so that every SM has several programs."""
    block_k = min(triton.next_power_of_2(k), 8192)
    while block_k > 512 and 3 * triton.cdiv(k, block_k) * block_k > 4 * k:
        block_k //= 2
    warps = max(block_k // 512, 1)
    block_n = next((rows for rows in (8, 4) if n >= 4 * rows * sms()), 2) if warps < 16 else 4 if n >= 8 * sms() else 2
    return Gemv(block_n, block_k, warps)


@triton.jit
def dot_runs(values, x, scale):
    """values [N, R * RUN], x float32 [R, RUN], scale float32 [R] -> float32 [N, R], the sum of each run"""
    wide = tl.reshape(values.to(tl.float32), [values.shape[0], x.shape[0], x.shape[1]])
    return tl.sum(wide * x[None, :, :], axis=2) * scale[None, :]


@triton.jit
def columns(rows, tile: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns of a tile of rows of K; `rows` [N, 1] point at their starts."""
    at = tile * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    if (tile + 1) * BLOCK_K <= K:
        values = tl.load(rows + at)
    else:
        values = tl.load(rows + at, at < K, other=0.0)
    return values


@triton.jit
def run_values(x, tile: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr):
    """A tile of x as float32 [R, RUN]"""
    run = tile * (BLOCK_K // RUN) + tl.arange(0, BLOCK_K // RUN)
    at = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    return tl.load(x + at, at < K, other=0.0).to(tl.float32)


@triton.jit
def run_scales(scales, scale_col, tile: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr):
    """The scale of each run, [R]; 1 without `scales`"""
    if scales is None:
        values = tl.full([BLOCK_K // RUN], 1.0, tl.float32)
    else:
        at = (tile * (BLOCK_K // RUN) + tl.arange(0, BLOCK_K // RUN)) * RUN
        values = tl.load(scales + at // 128 * scale_col, at < K, other=0.0)
    return values


@triton.jit
def _gemv(
    x, weight, scales, out, n, x_stride, weight_stride, scale_row, scale_col,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    row = first + tl.arange(0, BLOCK_N)
    rows = weight + tl.minimum(row, n - 1)[:, None].to(tl.int64) * weight_stride
    scales += first // 128 * scale_row
    values = columns(rows, 0, K, BLOCK_K)
    totals = ()
    for _ in tl.static_range(TOKENS):
        totals += (tl.zeros([BLOCK_N, BLOCK_K // 16], tl.float32),)  # type: ignore[assignment]  # Triton unrolls
    for tile in tl.static_range(TILES):
        ahead = values
        if tile + 1 < TILES:
            ahead = columns(rows, tile + 1, K, BLOCK_K)
        inputs, scale = run_values(x, tile, K, BLOCK_K, 16), run_scales(scales, scale_col, tile, K, BLOCK_K, 16)
        sums = ()
        for token in tl.static_range(TOKENS):
            if token > 0:
                inputs = run_values(x + token * x_stride, tile, K, BLOCK_K, 16)
            sums += (totals[token] + dot_runs(values, inputs, scale),)  # type: ignore[assignment]  # Triton unrolls
        values, totals = ahead, sums
    for token in tl.static_range(TOKENS):
        tl.store(out + token * n + row, tl.sum(totals[token], axis=1).to(out.dtype.element_ty), row < n)


def gemv(x: Tensor, weight: Fp8, out: Tensor, chosen: Gemv) -> None:
    """x [T, K] times weight [N, K], into out [T, N]; rows of x and of the weight may lie apart."""
    n, k = weight.data.shape
    assert x.stride(1) == 1 and out.is_contiguous() and 128 % chosen.block_n == 0 and chosen.block_k % 16 == 0, chosen
    _gemv[(triton.cdiv(n, chosen.block_n),)](
        x, weight.data, weight.scales, out, n, x.stride(0), weight.data.stride(0), *weight.scales.stride(),
        K=k, BLOCK_N=chosen.block_n, BLOCK_K=chosen.block_k, TILES=triton.cdiv(k, chosen.block_k),
        TOKENS=x.shape[0], num_warps=chosen.warps,
    )  # fmt: skip
