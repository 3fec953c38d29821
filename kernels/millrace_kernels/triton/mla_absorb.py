"""Queries of up to SMALL_TOKENS tokens: one program owns a head and some of its columns, so the weight is read once,
and the rotation rides along in programs of its own. All other products are cuBLAS's, through strided views, so nothing
is copied, unless our kernels were measured to be faster: they spare the launch for the rotation, or for the
quantisation of what o_proj reads, where a head's values are one group.

FP8 weights, as the projection is stored, halve the bytes; products are still BF16 and exact to the weight.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, Fp8, Operand
from millrace_kernels.gpu import sms
from millrace_kernels.triton.quant import empty_fp8, quantise
from millrace_kernels.triton.rope import rotate, rotate_into
from millrace_kernels.triton.small_linear import exact_bf16
from millrace_kernels.tuned import Table

BLOCK_T = 16  # rows of the smallest tensor-core tile
LEAST_COLUMNS = 32  # of a tile of few tokens
CLASSES = (32, 64, 128, 256)  # tokens up to which a measured tile holds
WIDTHS = 128, 512  # of a head of V3 and of its latent: the tables hold for these, and tiles need not divide others


class Tile(NamedTuple):
    columns: int  # of a head
    warps: int = 4
    tokens: int = BLOCK_T


# (class of tokens, heads, bytes of the weight's elements) -> the fastest, where it beats cuBLAS with the launch that it
# spares. The estimate is for comparisons.
ESTIMATE = Tile(BLOCK, 8, 64)
ABSORB, PROJECT_QUANT = Table("absorb_q", Tile), Table("project_v_quant", Tile)


def _is_measured(table: Table[Tile], num_tokens: int, shape: tuple[int, ...]) -> bool:
    """Whether our kernel is faster for a weight [H, N or V, C]; shape: of that, and bytes of an element."""
    heads, *widths, size = shape
    return tuple(widths) == WIDTHS and table.get(_class(num_tokens), heads, size) is not None


absorb_is_measured = functools.partial(_is_measured, ABSORB)
project_quant_is_measured = functools.partial(_is_measured, PROJECT_QUANT)


def _class(num_tokens: int) -> int:
    return next((most for most in CLASSES if num_tokens <= most), 0)


def absorb_q(q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor, quantised: Fp8 | None = None) -> Tensor:
    nope, latent = w_uk.shape[1:]
    out = q.new_empty(*q.shape[:2], latent + q.shape[2] - nope)
    torch.bmm(q[..., :nope].transpose(0, 1), w_uk, out=out[..., :latent].transpose(0, 1))
    rotate_into(out[..., latent:], q[..., nope:], cos, sin)
    return out


def absorb_q_small(q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor, quantised: Fp8 | None = None) -> Tensor:
    return absorb_q_with(q, w_uk, cos, sin, Tile(columns(q.shape[1], w_uk.shape[2])))


def absorb_q_many(q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor, quantised: Fp8 | None = None) -> Tensor:
    weight = quantised or w_uk
    tile = ABSORB.get(_class(q.shape[0]), q.shape[1], _parts(weight)[0].itemsize) or ESTIMATE
    return absorb_q_with(q, weight, cos, sin, tile)


def absorb_q_with(q: Tensor, w_uk: Tensor | Fp8, cos: Tensor, sin: Tensor, tile: Tile) -> Tensor:
    """An FP8 w_uk has scales [H, C/128]; a tile's columns then lie in one block."""
    weight, scales, fp8 = _parts(w_uk)
    (tokens, heads, _), (nope, latent) = q.shape, weight.shape[1:]
    assert q.stride(2) == weight.stride(2) == cos.stride(1) == sin.stride(1) == 1 and cos.stride(0) == sin.stride(0)
    assert not fp8 or BLOCK % tile.columns == 0, tile
    out = q.new_empty(tokens, heads, latent + q.shape[2] - nope)
    if tokens:
        _absorb[(heads, latent // tile.columns + 1, triton.cdiv(tokens, tile.tokens))](
            out, q, weight, scales, cos, sin,
            tokens, *out.stride()[:2], *q.stride()[:2], *weight.stride()[:2], scales.stride(0), cos.stride(0),
            N=nope, C=latent, HALF=cos.shape[1], BLOCK_T=tile.tokens, BLOCK_C=tile.columns, FP8=fp8,
            num_warps=tile.warps,
        )  # fmt: skip
    return out


def project_v_quant(latent: Tensor, w_uv: Tensor, quantised: Fp8 | None = None) -> Operand:
    weight = quantised or w_uv
    tile = PROJECT_QUANT.get(_class(latent.shape[0]), latent.shape[1], _parts(weight)[0].itemsize) or ESTIMATE
    return project_v_quant_with(latent, weight, tile)


def project_v_quant_with(latent: Tensor, w_uv: Tensor | Fp8, tile: Tile) -> Operand:
    """An FP8 w_uv has scales [H, C/128]."""
    weight, scales, fp8 = _parts(w_uv)
    tokens, heads, width = latent.shape
    assert tile.columns == weight.shape[1] == BLOCK, "a head's values are one group"
    assert latent.stride(2) == weight.stride(2) == 1
    out = empty_fp8(tokens, heads * BLOCK, latent.device)
    if tokens:
        _project_quant[(heads, triton.cdiv(tokens, tile.tokens))](
            *out, latent, weight, scales,
            tokens, out.data.stride(0), out.scales.stride(1),
            *latent.stride()[:2], *weight.stride()[:2], scales.stride(0),
            C=width, V=BLOCK, BLOCK_T=tile.tokens, BLOCK_C=BLOCK if fp8 else min(width, 256), FP8=fp8,
            num_warps=tile.warps,
        )  # fmt: skip
    return Operand(None, out)


def _parts(weight: Tensor | Fp8) -> tuple[Tensor, Tensor, bool]:
    """Its values, its scales (any tensor in their place for plain ones), and whether it is FP8."""
    return (*weight, True) if isinstance(weight, Fp8) else (weight, weight, False)


def columns(heads: int, width: int) -> int:
    """The widest tile of a head that still makes two programs for every SM, so that enough loads are under way; a power
    of two that divides `width`.
    """
    block = width & -width
    while block > LEAST_COLUMNS and heads * (width // block) < 2 * sms():
        block //= 2
    return block


@triton.jit(do_not_specialize=["tokens"])
def _absorb(
    out_ptr, q_ptr, w_ptr, scales_ptr, cos_ptr, sin_ptr,
    tokens, out_row, out_head, q_row, q_head, w_head, w_row, scale_head, angle_row,
    N: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    head, part = tl.program_id(0), tl.program_id(1)
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    present = token < tokens
    q_rows = q_ptr + head * q_head + token * q_row
    out_rows = out_ptr + head * out_head + token * out_row
    if part == C // BLOCK_C:
        pe, angles = tl.arange(0, 2 * HALF)[None, :], token[:, None] * angle_row + tl.arange(0, HALF)[None, :]
        cos = tl.load(cos_ptr + angles, mask=present[:, None], other=0.0)
        sin = tl.load(sin_ptr + angles, mask=present[:, None], other=0.0)
        x = tl.load(q_rows[:, None] + N + pe, mask=present[:, None], other=0.0)
        rotated = rotate(x.to(tl.float32), cos, sin).to(out_ptr.dtype.element_ty)
        tl.store(out_rows[:, None] + C + pe, rotated, mask=present[:, None])
    else:
        inner, column = tl.arange(0, N), part * BLOCK_C + tl.arange(0, BLOCK_C)
        w = tl.load(w_ptr + head.to(tl.int64) * w_head + inner[:, None] * w_row + column[None, :])
        nope = tl.load(q_rows[:, None] + inner[None, :], mask=present[:, None], other=0.0)
        if FP8:
            scale = tl.load(scales_ptr + head * scale_head + part * BLOCK_C // 128)
            product = tl.dot(nope, exact_bf16(w).to(nope.dtype), input_precision="ieee") * scale
        else:
            product = tl.dot(nope, w, input_precision="ieee")
        tl.store(out_rows[:, None] + column[None, :], product.to(out_ptr.dtype.element_ty), mask=present[:, None])


@triton.jit(do_not_specialize=["tokens", "out_scale_col"])
def _project_quant(
    out_ptr, out_scales_ptr, latent_ptr, w_ptr, scales_ptr,
    tokens, out_row, out_scale_col, latent_row, latent_head, w_head, w_row, scale_head,
    C: tl.constexpr, V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    present = (token < tokens)[:, None]
    column = tl.arange(0, V)
    inner = tl.arange(0, BLOCK_C)
    x_tile = latent_ptr + head * latent_head + token[:, None] * latent_row + inner[None, :]
    w_tile = w_ptr + head.to(tl.int64) * w_head + column[:, None] * w_row + inner[None, :]
    total = tl.zeros((BLOCK_T, V), dtype=tl.float32)
    for first in tl.static_range(0, C, BLOCK_C):
        x = tl.load(x_tile + first, mask=present, other=0.0)
        if FP8:
            scale = tl.load(scales_ptr + head * scale_head + first // 128)
            w = exact_bf16(tl.load(w_tile + first)).to(x.dtype)
            total += tl.dot(x, tl.trans(w), input_precision="ieee") * scale
        else:
            total += tl.dot(x, tl.trans(tl.load(w_tile + first)), input_precision="ieee")
    out_tile = out_ptr + token[:, None] * out_row + head * V + column[None, :]
    # as if the values had been written first
    quantised, scale = quantise(total.to(latent_ptr.dtype.element_ty).to(tl.float32))
    tl.store(out_tile, quantised, mask=present)
    tl.store(out_scales_ptr + head.to(tl.int64) * out_scale_col + token, scale, mask=token < tokens)
