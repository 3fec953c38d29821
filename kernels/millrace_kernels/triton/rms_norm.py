"""RMS norm of a row per program; residual add before it and quantisation after it in the same pass.

A row is one or more tiles [groups, 128], so the maximum of a group is one reduction over the last axis. Few rows are
one tile each, masked where the width is no power of two. Many rows are tiles of 1024 columns, of which 7168 are 7: no
lane is idle, each holds the 8 neighbours that it loads and stores at once, and five rows fit onto an SM at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import BLOCK, Operand
from millrace_kernels.triton.quant import empty_fp8, quantise


@triton.jit(do_not_specialize=["scale_stride"])
def _rms_norm(
    x, residual, weight, out, total, data, scales,
    width, eps, x_stride, residual_stride, scale_stride,
    TILES: tl.constexpr, GROUPS: tl.constexpr, ADD: tl.constexpr, PLAIN: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x, residual = x + row * x_stride, residual + row * residual_stride
    out, total, data = out + row * width, total + row * width, data + row * width
    groups = tl.arange(0, GROUPS)
    cols = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    gain = tl.load(weight + cols, cols < width, other=0.0)
    sums = ()
    for tile in tl.static_range(TILES):
        at = tile * GROUPS * 128 + cols
        values = tl.load(x + at, at < width, other=0.0).to(tl.float32)
        if ADD:
            values += tl.load(residual + at, at < width, other=0.0).to(tl.float32)
        sums += (values.to(total.dtype.element_ty),)  # type: ignore[assignment]  # Triton unrolls
    squares = tl.zeros([GROUPS, 128], tl.float32)
    for tile in tl.static_range(TILES):
        at, values = tile * GROUPS * 128 + cols, sums[tile].to(tl.float32)
        if ADD:
            tl.store(total + at, sums[tile], at < width)
        squares += values * values
    inverse = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / width + eps)
    for tile in tl.static_range(TILES):
        at = tile * GROUPS * 128 + cols
        if tile > 0:
            gain = tl.load(weight + at, at < width, other=0.0)
        normed = (sums[tile].to(tl.float32) * inverse * gain.to(tl.float32)).to(total.dtype.element_ty)
        if PLAIN:
            tl.store(out + at, normed, at < width)
        if QUANT:
            quantised, scale = quantise(normed.to(tl.float32))
            tl.store(data + at, quantised, at < width)
            group = tile * GROUPS + groups
            tl.store(scales + group.to(tl.int64) * scale_stride + row, scale, group * 128 < width)


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, quant: bool, plain: bool,
    chosen: tuple[int, int] | None = None,
) -> tuple[Operand, Tensor]:  # fmt: skip
    """`chosen`: another tile than `tile`."""
    assert x.dim() == 2 and x.stride(1) == 1, (x.shape, x.stride())
    assert residual is None or residual.stride(1) == 1, residual.stride()
    (num_tokens, width), (groups, warps) = x.shape, chosen or tile(*x.shape)
    quant = quant and num_tokens > SMALL_TOKENS
    out = x.new_empty(x.shape) if plain or not quant or x.dtype != torch.bfloat16 else None
    fp8 = empty_fp8(num_tokens, width, x.device) if quant else None
    total = x if residual is None else x.new_empty(num_tokens, width)
    if num_tokens:
        added = x if residual is None else residual  # a pointer that is not read, as the next ones are not written
        written, (data, scales) = x if out is None else out, fp8 or (x, x)
        _rms_norm[(num_tokens,)](
            x, added, weight, written, total, data, scales,
            width, eps, x.stride(0), added.stride(0), scales.stride(1),
            TILES=triton.cdiv(width, groups * BLOCK), GROUPS=groups,
            ADD=residual is not None, PLAIN=out is not None, QUANT=quant, num_warps=warps,
        )  # fmt: skip
    return Operand(out, fp8), total


def tile(num_tokens: int, width: int) -> tuple[int, int]:
    """(groups, warps) of a row's tiles. Few rows, two on an SM, are waited for: many lanes share one, as one tile."""
    if num_tokens > 256 and width % 1024 == 0:
        return 8, 4
    row, per_lane = triton.next_power_of_2(width), 16 if num_tokens <= 256 else 32
    return max(1, row // BLOCK), max(1, min(16, row // (32 * per_lane)))
