"""Up to SMALL_TOKENS tokens one program owns a head and some of its columns: the weight is read once, and the rotation
rides along in programs of its own. For more tokens cuBLAS multiplies, through strided views, so nothing is copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.triton.launch import options, wait
from millrace_kernels.triton.rope import rotate, rotate_into

PROGRAMS = 264  # two for each of an H200's 132 multiprocessors: enough loads in flight
BLOCK_T = 16  # rows of the smallest tensor-core tile


def absorb_q(q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    nope, latent = w_uk.shape[1:]
    out = q.new_empty(*q.shape[:2], latent + q.shape[2] - nope)
    torch.bmm(q[..., :nope].transpose(0, 1), w_uk, out=out[..., :latent].transpose(0, 1))
    rotate_into(out[..., latent:], q[..., nope:], cos, sin)
    return out


def absorb_q_small(q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return absorb_q_with(q, w_uk, cos, sin, columns(q.shape[1], w_uk.shape[2], 32))


def absorb_q_with(q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor, block: int, num_warps: int = 4) -> Tensor:
    """`block`: columns of a program."""
    (tokens, heads, _), (nope, latent) = q.shape, w_uk.shape[1:]
    assert tokens <= BLOCK_T and q.stride(2) == w_uk.stride(2) == cos.stride(1) == sin.stride(1) == 1
    assert cos.stride(0) == sin.stride(0)
    out = q.new_empty(tokens, heads, latent + q.shape[2] - nope)
    if tokens:
        _absorb[(heads, latent // block + 1)](
            out, q, w_uk, cos, sin,
            tokens, *out.stride()[:2], *q.stride()[:2], *w_uk.stride()[:2], cos.stride(0),
            N=nope, C=latent, HALF=cos.shape[1], BLOCK_T=BLOCK_T, BLOCK_C=block, **options(num_warps),
        )  # fmt: skip
    return out


def project_v_small(latent: Tensor, w_uv: Tensor) -> Tensor:
    return project_v_with(latent, w_uv, columns(latent.shape[1], w_uv.shape[1], 16))


def project_v_with(latent: Tensor, w_uv: Tensor, block: int, num_warps: int = 4) -> Tensor:
    """`block`: columns of a program."""
    (tokens, heads, width), value = latent.shape, w_uv.shape[1]
    assert tokens <= BLOCK_T and latent.stride(2) == w_uv.stride(2) == 1
    out = latent.new_empty(tokens, heads * value)
    if tokens:
        _project[(heads, value // block)](
            out, latent, w_uv,
            tokens, out.stride(0), *latent.stride()[:2], *w_uv.stride()[:2],
            C=width, V=value, BLOCK_T=BLOCK_T, BLOCK_V=block, BLOCK_C=min(width, 256), num_warps=num_warps,
        )  # fmt: skip
    return out


def columns(heads: int, width: int, least: int) -> int:
    """The widest tile of a head that still makes PROGRAMS programs; a power of two that divides `width`."""
    block = width & -width
    while block > least and heads * (width // block) < PROGRAMS:
        block //= 2
    return block


@triton.jit
def _absorb(
    out_ptr, q_ptr, w_ptr, cos_ptr, sin_ptr,
    tokens, out_row, out_head, q_row, q_head, w_head, w_row, angle_row,
    N: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head, part = tl.program_id(0), tl.program_id(1)
    token = tl.arange(0, BLOCK_T)
    present = token < tokens
    q_rows = q_ptr + head * q_head + token * q_row
    out_rows = out_ptr + head * out_head + token * out_row
    if part == C // BLOCK_C:
        wait(PDL)
        pe, angles = tl.arange(0, 2 * HALF)[None, :], token[:, None] * angle_row + tl.arange(0, HALF)[None, :]
        cos = tl.load(cos_ptr + angles, mask=present[:, None], other=0.0)
        sin = tl.load(sin_ptr + angles, mask=present[:, None], other=0.0)
        x = tl.load(q_rows[:, None] + N + pe, mask=present[:, None], other=0.0)
        rotated = rotate(x.to(tl.float32), cos, sin).to(out_ptr.dtype.element_ty)
        tl.store(out_rows[:, None] + C + pe, rotated, mask=present[:, None])
    else:
        inner, column = tl.arange(0, N), part * BLOCK_C + tl.arange(0, BLOCK_C)
        w = tl.load(w_ptr + head.to(tl.int64) * w_head + inner[:, None] * w_row + column[None, :])
        wait(PDL)
        nope = tl.load(q_rows[:, None] + inner[None, :], mask=present[:, None], other=0.0)
        product = tl.dot(nope, w, input_precision="ieee")
        tl.store(out_rows[:, None] + column[None, :], product.to(out_ptr.dtype.element_ty), mask=present[:, None])


@triton.jit
def _project(
    out_ptr, latent_ptr, w_ptr,
    tokens, out_row, latent_row, latent_head, w_head, w_row,
    C: tl.constexpr, V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Never launched as a dependent: the kernel before may be FlashMLA's last, see lib/flash_mla.py."""
    head = tl.program_id(0)
    token = tl.arange(0, BLOCK_T)
    present = (token < tokens)[:, None]
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inner = tl.arange(0, BLOCK_C)
    x_tile = latent_ptr + head * latent_head + token[:, None] * latent_row + inner[None, :]
    w_tile = w_ptr + head.to(tl.int64) * w_head + column[:, None] * w_row + inner[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_V), dtype=tl.float32)
    for first in tl.static_range(0, C, BLOCK_C):
        x = tl.load(x_tile + first, mask=present, other=0.0)
        total += tl.dot(x, tl.trans(tl.load(w_tile + first)), input_precision="ieee")
    out_tile = out_ptr + token[:, None] * out_row + head * V + column[None, :]
    tl.store(out_tile, total.to(out_ptr.dtype.element_ty), mask=present)
