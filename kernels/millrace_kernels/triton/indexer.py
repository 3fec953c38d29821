"""The indexer's small steps, each in one launch: rows become E4M3, rotated and transformed, and chosen keys slots.

The Hadamard transform is a product with a matrix of +1 and -1, which is made in registers: entry (i, j) is negative
where i & j has an odd number of bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.indexer import E4M3, EPS, IndexRows
from millrace_kernels.triton.quant import quantise

BLOCK_ROWS = 16  # the least of a product's rows
BLOCK_SLOTS = 1024


def index_rows(x: Tensor, cos: Tensor, sin: Tensor) -> IndexRows:
    out = IndexRows(torch.empty_like(x, dtype=E4M3), torch.empty(x.shape[:2], dtype=torch.float32, device=x.device))
    _launch(x, out, cos, sin, x.shape[1], 1, None, None)
    return out


def index_store(
    cache: IndexRows, slots: Tensor, k: Tensor, norm: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor
) -> None:
    _launch(k, cache, cos, sin, 1, cache.data.shape[1], slots, norm)


def _launch(
    x: Tensor, out: IndexRows, cos: Tensor, sin: Tensor, heads: int, page_size: int,
    slots: Tensor | None, norm: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """Without slots and a norm: row r of x goes to row r of out."""
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    assert out.scales is not None and cos.stride() == sin.stride() and cos.stride(1) == 1, (cos.stride(), sin.stride())
    if rows:
        row_or_page = (width, 1) if slots is None else (out.data.stride(0), out.scales.stride(0))
        weight, bias = (x, x) if norm is None else norm
        _rows[(triton.cdiv(rows, BLOCK_ROWS),)](
            out.data, out.scales, x, cos, sin, slots, weight, bias,
            rows, heads, cos.stride(0), *row_or_page,
            ROOT=width**-0.5, EPS=EPS, PAGE=page_size, WIDTH=width, HALF=cos.shape[1], BLOCK=BLOCK_ROWS,
            NORM=norm is not None, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def _rows(
    out_ptr, scales_ptr, x_ptr, cos_ptr, sin_ptr, slots_ptr, weight_ptr, bias_ptr,
    rows, heads, angle_row, out_stride, scale_stride,
    ROOT: tl.constexpr, EPS: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col, present = tl.arange(0, WIDTH), row < rows
    pair = tl.where(col < HALF, col + HALF, tl.where(col < 2 * HALF, col - HALF, col))
    at = x_ptr + row[:, None].to(tl.int64) * WIDTH
    x = tl.load(at + col[None, :], present[:, None], other=0.0).to(tl.float32)
    other = tl.load(at + pair[None, :], present[:, None], other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(x, axis=1) / WIDTH
        centred = x - mean[:, None]
        inverse = tl.rsqrt(tl.sum(centred * centred, axis=1) / WIDTH + EPS)[:, None]
        x = centred * inverse * tl.load(weight_ptr + col)[None, :] + tl.load(bias_ptr + col)[None, :]
        other = (other - mean[:, None]) * inverse * tl.load(weight_ptr + pair)[None, :]
        other += tl.load(bias_ptr + pair)[None, :]
    angle = (row // heads)[:, None].to(tl.int64) * angle_row + (col % HALF)[None, :]
    turned = present[:, None] & (col < 2 * HALF)[None, :]
    cos, sin = tl.load(cos_ptr + angle, turned, other=1.0), tl.load(sin_ptr + angle, turned, other=0.0)
    rotated = x * cos + tl.where(col < HALF, -1.0, 1.0)[None, :] * other * sin
    bits = col[:, None] & col[None, :]
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    signs = (1.0 - 2.0 * (bits & 1).to(tl.float32)).to(tl.bfloat16)
    mixed = tl.dot(rotated.to(tl.bfloat16), signs) * ROOT
    data, scale = quantise(mixed)
    place, page = row.to(tl.int64), tl.zeros_like(row)
    if NORM:
        slot = tl.load(slots_ptr + row, present, other=0)
        place, page = slot // PAGE, (slot % PAGE).to(tl.int32)
    tl.store(out_ptr + (place * out_stride + page * WIDTH)[:, None] + col[None, :], data, present[:, None])
    tl.store(scales_ptr + place * scale_stride + page, scale, present)


def index_slots(values: Tensor, keys: Tensor, topk: int, page_table: Tensor, page_size: int) -> Tensor:
    rows, found = keys.shape
    out = torch.empty(rows, topk, dtype=torch.int32, device=keys.device)
    assert values.is_contiguous() and keys.is_contiguous() and page_table.stride(1) == 1
    if rows:
        _slots[(rows, triton.cdiv(topk, BLOCK_SLOTS))](
            out, values, keys, page_table,
            found, topk, page_table.stride(0) if page_table.shape[0] > 1 else 0,
            PAGE=page_size, BLOCK=BLOCK_SLOTS, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["page_table_row"], do_not_specialize_on_alignment=["page_table_ptr"])
def _slots(
    out_ptr, values_ptr, keys_ptr, page_table_ptr, found, topk, page_table_row, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(values_ptr + row * found + at, at < found, other=-float("inf")) > -float("inf")
    key = tl.load(keys_ptr + row * found + at, chosen, other=0)
    page = tl.load(page_table_ptr + row * page_table_row + key // PAGE, chosen, other=0)
    slot = page * PAGE + (key % PAGE).to(tl.int32)
    tl.store(out_ptr + row * topk + at, tl.where(chosen, slot, -1), at < topk)
