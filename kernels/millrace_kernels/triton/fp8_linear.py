"""FP8 product on the tensor cores, for 17 to some hundred tokens, where its cost is one read of the weight.

    out_tn = sum over 128-column blocks b of x_scale_tb * w_scale_nb * (sum over k in b of x_tk w_nk)

A program makes BLOCK_N rows of the weight by BLOCK_M tokens. The weight is the left operand: wgmma takes 64 of its rows
at a time, and as many tokens as there are. Each block's product is scaled in FP32 before it is added: the tensor cores'
own sums are too coarse for all of K.

Where N alone gives too few programs, K is cut into SPLITS parts. They are added in order, so a shape has one result:
by the program that is the last of its tile to finish (`joined`, which counts with an atomic), or by one more launch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from millrace_kernels.fp8 import BLOCK, Fp8
from millrace_kernels.gpu import fitting, sms
from millrace_kernels.scratch import zeros
from millrace_kernels.triton.small_linear import reduce_parts
from millrace_kernels.tuned import Table

GROUP_M = 8  # tiles of tokens that share rows of the weight while those are in the L2 cache
CLASSES = (32, 64, 128, 256)  # tokens up to which a measured configuration holds
MANY_SMS = 100  # an H100 or H200 has 132, an H20 78


class Fp8LinearConfig(NamedTuple):
    block_m: int  # tokens
    block_n: int  # rows of the weight: a divisor of 128, so that they share their scales
    splits: int
    warps: int
    stages: int
    registers: int = 0  # of a thread at most, so that more programs fit on an SM; 0: as the compiler likes
    tma: bool = True  # tiles are loaded by TMA; else by pointers, and always where TMA cannot address the operands
    joined: bool = True  # no second launch after splits


# (class of tokens, N, K) -> the fastest, where it beats DeepGEMM
MEASURED = Table("fp8_linear", Fp8LinearConfig)


def config(num_tokens: int, n: int, k: int) -> Fp8LinearConfig:
    return MEASURED.get(_class(num_tokens), n, k) or _estimate(num_tokens, n, k)


def is_measured(num_tokens: int, shape: tuple[int, ...]) -> bool:
    """Whether this is faster than DeepGEMM, for a weight of that shape [N, K]."""
    return MEASURED.get(_class(num_tokens), shape[0], shape[1]) is not None


def _class(num_tokens: int) -> int:
    return next((most for most in CLASSES if num_tokens <= most), 0)


def _estimate(num_tokens: int, n: int, k: int) -> Fp8LinearConfig:
    """Up to 256 tokens two programs for every SM, of at least four blocks each. More: two groups of four warps that
    share a tile; on GPUs with few SMs tiles half as high, whose programs take turns on an SM.
    """
    if num_tokens > CLASSES[-1]:
        tile = Fp8LinearConfig(128, 128, 1, 8, 4) if sms() >= MANY_SMS else Fp8LinearConfig(64, 128, 1, 4, 4)
    else:
        tile = Fp8LinearConfig(64, 128, 1, 4, 4) if num_tokens <= 64 else Fp8LinearConfig(128, 64, 1, 4, 4)
        programs = triton.cdiv(max(num_tokens, 1), tile.block_m) * triton.cdiv(n, tile.block_n)
        tile = tile._replace(splits=max(1, min(2 * sms() // programs, triton.cdiv(k, BLOCK) // 4)))
    return tile._replace(stages=fitting(tile.stages, (tile.block_m + tile.block_n) * BLOCK))


@triton.jit
def _join(parts, out, at, written, size, splits):
    """The sum of all parts, `size` apart, in order, for some elements."""
    result = tl.zeros(at.shape, tl.float32)
    for part in tl.range(0, splits, num_stages=1):
        result += tl.load(parts + part * size + at, written, other=0.0, cache_modifier=".cg")
    tl.store(out + at, result.to(out.dtype.element_ty), written)


@triton.jit(do_not_specialize=["num_tokens", "blocks_per_split", "x_scale_col", "w_scale_row"])
def _fp8_linear(
    x, x_scales, weight, w_scales, out, parts, arrivals, num_tokens, n, k, blocks_per_split,
    x_stride, x_scale_row, x_scale_col, weight_stride, w_scale_row, w_scale_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, JOINED: tl.constexpr, TMA: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """With TMA, x, x_scales and weight are descriptors: of tiles [BLOCK_M, 128], of columns [1, BLOCK_M] of the scales
    transposed, and of tiles [BLOCK_N, 128]; beyond the edges are zeros.
    """
    tiles_m, tiles_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tile_m, tile_n = tl.swizzle2d(tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n, tiles_m, tiles_n, GROUP)
    tokens = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    split, splits = tl.program_id(1), tl.num_programs(1)
    first, last = split * blocks_per_split, tl.minimum((split + 1) * blocks_per_split, tl.cdiv(k, 128))
    w_scale_at = w_scales + tile_n * BLOCK_N // 128 * w_scale_row
    w_scale = tl.load(w_scale_at + first * w_scale_col)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        next_w_scale = tl.load(w_scale_at + tl.minimum(block + 1, last - 1) * w_scale_col)  # scalars are not pipelined
        if TMA:
            values = weight.load([tile_n * BLOCK_N, block * 128])
            x_scale = tl.reshape(x_scales.load([block, tile_m * BLOCK_M]), [BLOCK_M])
            inputs = x.load([tile_m * BLOCK_M, block * 128])
        else:
            at = block * 128 + tl.arange(0, 128)
            x_at = x + tokens[:, None].to(tl.int64) * x_stride + at[None, :]
            inputs = tl.load(x_at, (tokens < num_tokens)[:, None] & (at < k)[None, :], other=0.0)
            values_at = weight + rows[:, None].to(tl.int64) * weight_stride + at[None, :]
            values = tl.load(values_at, (rows < n)[:, None] & (at < k)[None, :], other=0.0)
            x_scale = tl.load(x_scales + tokens * x_scale_row + block * x_scale_col, tokens < num_tokens, other=0.0)
        total += tl.dot(values, tl.trans(inputs)) * (x_scale * w_scale)[None, :]
        w_scale = next_w_scale
    target = parts + split * num_tokens.to(tl.int64) * n if SPLIT else out
    at = tokens[:, None].to(tl.int64) * n + rows[None, :]
    written = (tokens < num_tokens)[:, None] & (rows < n)[None, :]
    tl.store(target + at, tl.trans(total).to(target.dtype.element_ty), written)
    if JOINED:
        tl.debug_barrier()  # all of the program's part is written before it counts
        if tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel") == splits - 1:
            _join(parts, out, at, written, num_tokens.to(tl.int64) * n, splits)


def fp8_linear(x: Fp8, weight: Fp8, dtype: torch.dtype, chosen: Fp8LinearConfig | None = None) -> Tensor:
    (num_tokens, k), n = x.data.shape, weight.data.shape[0]
    chosen = chosen or config(num_tokens, n, k)
    assert x.data.stride(1) == 1 and weight.data.stride(1) == 1, (x.data.stride(), weight.data.stride())
    assert BLOCK % chosen.block_n == 0, chosen
    out = torch.empty(num_tokens, n, dtype=dtype, device=x.data.device)
    if num_tokens == 0:
        return out
    blocks = triton.cdiv(triton.cdiv(k, BLOCK), chosen.splits)
    splits = triton.cdiv(triton.cdiv(k, BLOCK), blocks)  # none without work
    split, joined = splits > 1, splits > 1 and chosen.joined
    tiles = triton.cdiv(num_tokens, chosen.block_m) * triton.cdiv(n, chosen.block_n)
    parts = torch.empty(splits, num_tokens, n, dtype=torch.float32, device=out.device) if split else out
    arrivals = zeros(tiles, out.device) if joined else out
    tma = chosen.tma and all(map(_tma_addresses, (x.data, x.scales.t(), weight.data)))
    operands = _descriptors(x, weight, chosen) if tma else (x.data, x.scales, weight.data)
    _fp8_linear[(tiles, splits)](
        *operands, weight.scales, out, parts, arrivals, num_tokens, n, k, blocks,
        x.data.stride(0), *x.scales.stride(), weight.data.stride(0), *weight.scales.stride(),
        BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n, SPLIT=split, JOINED=joined, TMA=tma,
        GROUP=GROUP_M, STAGES=chosen.stages, maxnreg=chosen.registers or None, num_warps=chosen.warps,
    )  # fmt: skip
    if split and not joined:
        reduce_parts(parts, out)
    return out


def _tma_addresses(rows: Tensor) -> bool:
    aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0
    return aligned and rows.stride(1) == 1


def _descriptors(x: Fp8, weight: Fp8, chosen: Fp8LinearConfig) -> tuple[TensorDescriptor, ...]:
    return (
        TensorDescriptor.from_tensor(x.data, [chosen.block_m, BLOCK]),
        TensorDescriptor.from_tensor(x.scales.t(), [1, chosen.block_m]),
        TensorDescriptor.from_tensor(weight.data, [chosen.block_n, BLOCK]),
    )
