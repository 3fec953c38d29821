"""RMS norm of a row per program; residual add before it and quantisation after it in the same pass.

A row is a tile [groups, 128], the last groups masked where the width is no power of two; so the maximum of a group is
one reduction over the last axis, and the row's statistics one more over the first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import BLOCK, Fp8, Operand
from millrace_kernels.triton.launch import go_ahead, options, wait
from millrace_kernels.triton.quant import empty_fp8, quantise


@triton.jit
def _rms_norm(
    x, residual, weight, out, total, data, scales,
    width, eps, x_stride, residual_stride, scale_stride,
    GROUPS: tl.constexpr, ADD: tl.constexpr, QUANT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    cols = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = cols < width
    gain = tl.load(weight + cols, inside, other=0.0).to(tl.float32)
    wait(PDL)
    values = tl.load(x + row * x_stride + cols, inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * residual_stride + cols, inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * width + cols, rounded, inside)
        values = rounded.to(tl.float32)
    go_ahead(PDL)
    mean = tl.sum(tl.sum(values * values, axis=1), axis=0) / width
    normed = (values * tl.rsqrt(mean + eps) * gain).to(out.dtype.element_ty)
    tl.store(out + row * width + cols, normed, inside)
    if QUANT:
        quantised, scale = quantise(normed.to(tl.float32))
        tl.store(data + row * width + cols, quantised, inside)
        tl.store(scales + groups.to(tl.int64) * scale_stride + row, scale, groups * 128 < width)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, None, weight, eps, quant=False)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, _, total = _launch(x, residual, weight, eps, quant=False)
    return out, total


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float) -> Operand:
    out, fp8, _ = _launch(x, None, weight, eps, quant=x.shape[0] > SMALL_TOKENS)
    return Operand(out, fp8)


def add_rms_norm_quant(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Operand, Tensor]:
    return add_rms_norm_quant_with(x, residual, weight, eps, num_warps(*x.shape))


def add_rms_norm_quant_with(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, warps: int
) -> tuple[Operand, Tensor]:
    out, fp8, total = _launch(x, residual, weight, eps, quant=x.shape[0] > SMALL_TOKENS, warps=warps)
    return Operand(out, fp8), total


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, quant: bool, warps: int = 0
) -> tuple[Tensor, Fp8 | None, Tensor]:
    """norm, its FP8 form when asked for, sum (x itself without a residual)"""
    assert x.dim() == 2 and x.stride(1) == 1, (x.shape, x.stride())
    assert residual is None or residual.stride(1) == 1, residual.stride()
    num_tokens, width = x.shape
    out = x.new_empty(num_tokens, width)
    total = x if residual is None else x.new_empty(num_tokens, width)
    fp8 = empty_fp8(num_tokens, width, x.device) if quant else None
    if num_tokens:
        added = x if residual is None else residual  # a pointer that is not read
        data, scales = fp8 or (out, out)
        _rms_norm[(num_tokens,)](
            x, added, weight, out, total, data, scales,
            width, eps, x.stride(0), added.stride(0), scales.stride(1),
            GROUPS=triton.next_power_of_2(triton.cdiv(width, BLOCK)), ADD=residual is not None, QUANT=quant,
            **options(warps or num_warps(num_tokens, width)),
        )  # fmt: skip
    return out, fp8, total


def num_warps(num_tokens: int, width: int) -> int:
    """Few rows are waited for, so many lanes share one; many rows fill the GPU with 32 elements a lane."""
    per_lane = 16 if num_tokens <= 128 else 32
    return max(1, min(16, triton.next_power_of_2(width) // (32 * per_lane)))
