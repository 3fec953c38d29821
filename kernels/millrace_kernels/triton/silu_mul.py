"""SwiGLU, and SwiGLU with the quantisation of its result in the same pass, over the tiles of `quant.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import BLOCK, Operand
from millrace_kernels.triton.quant import config, empty_fp8, quantise


@triton.jit
def silu_times(gate, up):
    """float32 tiles"""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["num_tokens", "scale_stride"])
def _silu_mul(
    x, out, scales, num_tokens, width, x_stride, scale_stride,
    BLOCK_T: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = group * 128 + tl.arange(0, 128)
    inside = (rows < num_tokens)[:, None] & (cols < width)[None, :]
    at = rows[:, None].to(tl.int64)
    gate = tl.load(x + at * x_stride + cols[None, :], inside, other=0.0).to(tl.float32)
    up = tl.load(x + at * x_stride + width + cols[None, :], inside, other=0.0).to(tl.float32)
    result = silu_times(gate, up)
    if QUANT:
        quantised, scale = quantise(result)
        tl.store(out + at * width + cols[None, :], quantised, inside)
        tl.store(scales + group.to(tl.int64) * scale_stride + rows, scale, rows < num_tokens)
    else:
        tl.store(out + at * width + cols[None, :], result.to(out.dtype.element_ty), inside)


def silu_mul(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    _launch(x, out, out, 0)
    return out


def silu_mul_quant(x: Tensor) -> Operand:
    if x.shape[0] <= SMALL_TOKENS:
        return Operand(silu_mul(x), None)
    fp8 = empty_fp8(x.shape[0], x.shape[1] // 2, x.device)
    _launch(x, fp8.data, fp8.scales, fp8.scales.stride(1))
    return Operand(None, fp8)


def _launch(x: Tensor, out: Tensor, scales: Tensor, scale_stride: int) -> None:
    assert x.dim() == 2 and x.stride(1) == 1, (x.shape, x.stride())
    num_tokens, width = out.shape
    if num_tokens == 0:
        return
    block_t, num_warps = config(num_tokens)
    _silu_mul[(triton.cdiv(width, BLOCK), triton.cdiv(num_tokens, block_t))](
        x, out, scales, num_tokens, width, x.stride(0), scale_stride,
        BLOCK_T=block_t, QUANT=out.dtype == torch.float8_e4m3fn, num_warps=num_warps,
    )  # fmt: skip
