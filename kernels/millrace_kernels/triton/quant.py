"""Quantisation of 1 x 128 groups, SwiGLU, and both in one pass: each element is read once.

A program takes BLOCK_T rows of one group column, so neighbouring programs read neighbouring memory. Scales are written
column by column: those of a program are one run of floats. A lane reads 16 bytes at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import BLOCK, Fp8, Operand

# Largest number of tokens -> (rows, warps) of a program: few tokens need more programs, many need long ones.
CONFIGS = ((64, 4, 1), (1024, 8, 2), (1 << 62, 32, 4))


def config(num_tokens: int) -> tuple[int, int]:
    return next((rows, warps) for limit, rows, warps in CONFIGS if num_tokens <= limit)


def empty_fp8(num_tokens: int, width: int, device: torch.device) -> Fp8:
    """E4M3 [T, K] and scales [T, ceil(K/128)] with strides (1, T rounded up to 4), as TMA loads them."""
    storage = torch.empty(-(-width // BLOCK), -(-num_tokens // 4) * 4, dtype=torch.float32, device=device)
    data = torch.empty(num_tokens, width, dtype=torch.float8_e4m3fn, device=device)
    return Fp8(data, storage.t()[:num_tokens])


@triton.jit
def quantise(groups):
    """float32 [R, 128] -> E4M3 [R, 128], scales [R]. One division per group, whose inverse may turn a tie."""
    largest = tl.max(tl.abs(groups), axis=1)
    some = largest > 1e-30
    scale = tl.where(some, tl.div_rn(largest, 448.0), 1.0)
    scaled = groups * tl.where(some, 448.0 / tl.where(some, largest, 1.0), 1.0)[:, None]
    return scaled.to(tl.float8e4nv), scale


@triton.jit(do_not_specialize=["num_tokens", "scale_stride"])
def _quant_tiles(
    x, out, scales, num_tokens, width, x_stride, scale_stride,
    BLOCK_T: tl.constexpr, SILU: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """BLOCK_T rows of one group of columns. SILU: x is [T, 2 * width], gate then up."""
    group = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = group * 128 + tl.arange(0, 128)
    inside = (rows < num_tokens)[:, None] & (cols < width)[None, :]
    row = rows[:, None].to(tl.int64)
    at = x + row * x_stride + cols[None, :]
    values = tl.load(at, inside, other=0.0).to(tl.float32)
    if SILU:
        values = values / (1.0 + tl.exp(-values)) * tl.load(at + width, inside, other=0.0).to(tl.float32)
    to = out + row * width + cols[None, :]
    if QUANT:
        quantised, scale = quantise(values)
        tl.store(to, quantised, inside)
        tl.store(scales + group.to(tl.int64) * scale_stride + rows, scale, rows < num_tokens)
    else:
        tl.store(to, values.to(out.dtype.element_ty), inside)


def _launch(x: Tensor, out: Fp8, block_t: int, num_warps: int, silu: bool) -> None:
    """`out` may hold plain rows, and then any tensor in the place of scales."""
    assert x.dim() == 2 and x.stride(1) == 1, (x.shape, x.stride())
    num_tokens, width = out.data.shape
    if num_tokens:
        _quant_tiles[(triton.cdiv(width, BLOCK), triton.cdiv(num_tokens, block_t))](
            x, *out, num_tokens, width, x.stride(0), out.scales.stride(1),
            BLOCK_T=block_t, SILU=silu, QUANT=out.data.dtype == torch.float8_e4m3fn, num_warps=num_warps,
        )  # fmt: skip


def quant_groups(x: Tensor, chosen: tuple[int, int] | None = None) -> Fp8:
    out = empty_fp8(x.shape[0], x.shape[1], x.device)
    _launch(x, out, *(chosen or config(x.shape[0])), silu=False)
    return out


def silu_mul(x: Tensor, quant: bool = False) -> Operand:
    num_tokens, width = x.shape[0], x.shape[1] // 2
    if quant and num_tokens > SMALL_TOKENS:
        fp8 = empty_fp8(num_tokens, width, x.device)
        _launch(x, fp8, *config(num_tokens), silu=True)
        return Operand(None, fp8)
    out = x.new_empty(num_tokens, width)
    _launch(x, Fp8(out, out), *config(num_tokens), silu=True)
    return Operand(out, None)
