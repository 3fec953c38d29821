"""x [T <= 16, K] times an FP8 weight [N, K]: the weight streams through once and is dequantised in registers.

    out_tn = sum over 128-column blocks b of scale_nb * (sum over k in b of x_tk w_nk)

One token: `gemv.py`, on CUDA cores, unless `_gemm` was measured to be faster. More: `_gemm`, on tensor cores with the
tokens padded to 16; where N alone gives too few programs, K is cut into SPLITS parts and `_reduce` adds their sums in
order. Neither uses atomics: a shape has one result.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, Fp8, reference_small_linear
from millrace_kernels.gpu import sms
from millrace_kernels.triton.gemv import Gemv, estimate, gemv
from millrace_kernels.tuned import Table


class SmallLinearConfig(NamedTuple):  # of `_gemm`
    block_n: int  # divides 128, so that a program's rows share their scales
    splits: int
    warps: int
    stages: int


# (tokens, N, K) -> the fastest; the tokens are 1, 2, 3, 4 (also 3) or 16
MEASURED: Table[SmallLinearConfig | Gemv] = Table("small_linear", SmallLinearConfig, Gemv)


def config(num_tokens: int, n: int, k: int) -> SmallLinearConfig | Gemv:
    tokens = next(limit for limit in (1, 2, 4, 16) if num_tokens <= limit)
    return MEASURED.get(num_tokens, n, k) or MEASURED.get(tokens, n, k) or _estimate(tokens, n, k)


def _estimate(tokens: int, n: int, k: int) -> SmallLinearConfig | Gemv:
    """Enough programs for every SM to have several, so that tens of kilobytes are on their way to each all the time.

    Every program reads all of x: the more tokens, the more rows must share that.
    """
    if tokens == 1:
        return estimate(n, k)
    block_n, blocks = 32 if tokens <= 4 else 64, triton.cdiv(k, BLOCK)
    splits = min(triton.cdiv(2 * sms(), triton.cdiv(n, block_n)), max(blocks // 4, 1))
    return SmallLinearConfig(block_n, splits, 4, 6)


@triton.jit
def exact_bf16(weight):
    """E4M3 in BF16, by way of FP32: the direct cast takes a unit with an eighth of the others' throughput."""
    return weight.to(tl.float32).to(tl.bfloat16)


@triton.jit(do_not_specialize=["num_tokens", "scale_row", "blocks_per_split"])
def _gemm(
    x, weight, scales, out, num_tokens, n, k, x_stride, weight_stride, scale_row, scale_col, blocks_per_split,
    BLOCK_N: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """WHOLE: no edges."""
    first = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    tokens = tl.arange(0, 16)
    rows = first + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, 128)
    token_values = x + tokens[:, None] * x_stride
    row_weights = weight + rows[None, :].to(tl.int64) * weight_stride
    row_scales = scales + (first // 128) * scale_row
    total = tl.zeros([16, BLOCK_N], tl.float32)
    last = tl.minimum((split + 1) * blocks_per_split, tl.cdiv(k, 128))
    for block in tl.range(split * blocks_per_split, last, num_stages=STAGES):
        at = block * 128 + cols
        inside = at < k
        if WHOLE:
            values = tl.load(row_weights + at[:, None])
        else:
            values = tl.load(row_weights + at[:, None], inside[:, None] & (rows < n)[None, :], other=0.0)
        inputs = tl.load(token_values + at[None, :], inside[None, :] & (tokens < num_tokens)[:, None], other=0.0)
        scale = tl.load(row_scales + block * scale_col)
        total += tl.dot(inputs, exact_bf16(values)) * scale
    at_out = (split * num_tokens + tokens)[:, None].to(tl.int64) * n + rows[None, :]
    tl.store(out + at_out, total.to(out.dtype.element_ty), (tokens < num_tokens)[:, None] & (rows < n)[None, :])


@triton.jit
def _reduce(parts, out, size, SPLITS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """parts float32 [SPLITS, size] -> out [size]"""
    at = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    total = tl.zeros([BLOCK_SIZE], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * size + at, at < size, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), at < size)


def small_linear(x: Tensor, weight: Fp8, chosen: SmallLinearConfig | Gemv | None = None) -> Tensor:
    if x.dtype != torch.bfloat16:  # the tensor cores would round it
        return reference_small_linear(x, weight)
    num_tokens, n = x.shape[0], weight.data.shape[0]
    chosen = chosen or config(num_tokens, *weight.data.shape)
    assert x.stride(1) == 1 and weight.data.stride(1) == 1 and BLOCK % chosen.block_n == 0, (x.stride(), chosen)
    out = x.new_empty(num_tokens, n)
    if isinstance(chosen, Gemv):
        if num_tokens:
            gemv(x, weight, out, chosen)
    elif num_tokens:
        _launch_gemm(x, weight, out, chosen)
    return out


def _launch_gemm(x: Tensor, weight: Fp8, out: Tensor, chosen: SmallLinearConfig) -> None:
    (num_tokens, n), k = out.shape, x.shape[1]
    blocks = triton.cdiv(triton.cdiv(k, BLOCK), chosen.splits)
    splits = triton.cdiv(triton.cdiv(k, BLOCK), blocks)  # none without work
    parts = out if splits == 1 else torch.empty(splits, num_tokens, n, dtype=torch.float32, device=x.device)
    _gemm[(triton.cdiv(n, chosen.block_n), splits)](
        x, weight.data, weight.scales, parts, num_tokens, n, k, x.stride(0), weight.data.stride(0),
        *weight.scales.stride(), blocks, BLOCK_N=chosen.block_n, WHOLE=n % chosen.block_n == 0 and k % BLOCK == 0,
        STAGES=chosen.stages, num_warps=chosen.warps,
    )  # fmt: skip
    if splits > 1:
        reduce_parts(parts, out)


def reduce_parts(parts: Tensor, out: Tensor) -> None:
    """parts float32 [SPLITS, ...] -> their sum, in order, in out [...]"""
    size = out.numel()
    _reduce[(triton.cdiv(size, 512),)](parts, out, size, SPLITS=parts.shape[0], BLOCK_SIZE=512, num_warps=4)
