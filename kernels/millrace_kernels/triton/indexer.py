"""The indexer's small steps, each in one launch: queries and keys become E4M3, and chosen keys rows of the pool. And
attention to these by our kernel of decode rows, which splits them up.

The Hadamard transform is a product with a matrix of +1 and -1, which is made in registers: entry (i, j) is negative
where i & j has an odd number of bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.indexer import E4M3, EPS, IndexRows
from millrace_kernels.mla_sparse import pool_rows
from millrace_kernels.triton.mla_decode import mla_decode
from millrace_kernels.triton.quant import quantise

BLOCK_ROWS = 16  # the least of a product's rows
BLOCK_CHOSEN, BLOCK_MASKED = 1024, 4096


def index_queries(x: Tensor, weights: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    out, scaled = torch.empty_like(x, dtype=E4M3), torch.empty_like(weights)
    assert weights.is_contiguous(), weights.stride()
    _launch(x, out, scaled, cos, sin, x.shape[1], None, (weights, weights))
    return out, scaled


def index_store(
    cache: IndexRows, slots: Tensor, k: Tensor, norm: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor
) -> None:
    assert cache.scales is not None, "float32 keys have no scales"
    _launch(k, cache.data, cache.scales, cos, sin, 1, slots, norm)


def _launch(
    x: Tensor, out: Tensor, scales: Tensor, cos: Tensor, sin: Tensor, heads: int,
    slots: Tensor | None, factors: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """factors: with slots the weight and the bias of a norm, without what the scales are multiplied by, twice."""
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    assert cos.stride() == sin.stride() and cos.stride(1) == 1, (cos.stride(), sin.stride())
    if rows:
        _rows[(triton.cdiv(rows, BLOCK_ROWS),)](
            out, scales, x, cos, sin, slots, *factors,
            rows, heads, cos.stride(0), out.stride(0), scales.stride(0),
            EPS=EPS, ROOT=width**-0.5, WIDTH=width, HALF=cos.shape[1], PAGE=out.shape[1], BLOCK=BLOCK_ROWS,
            STORE=slots is not None, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def _rows(
    out_ptr, scales_ptr, x_ptr, cos_ptr, sin_ptr, slots_ptr, weight_ptr, bias_ptr,
    rows, heads, angle_row, out_stride, scale_stride,
    EPS: tl.constexpr, ROOT: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col, present = tl.arange(0, WIDTH), row < rows
    pair = tl.where(col < HALF, col + HALF, tl.where(col < 2 * HALF, col - HALF, col))
    at = x_ptr + row[:, None] * WIDTH
    x = tl.load(at + col[None, :], present[:, None], other=0.0).to(tl.float32)
    other = tl.load(at + pair[None, :], present[:, None], other=0.0).to(tl.float32)
    if STORE:
        mean = (tl.sum(x, axis=1) / WIDTH)[:, None]
        x, other = x - mean, other - mean
        inverse = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + EPS)[:, None]
        x = x * inverse * tl.load(weight_ptr + col)[None, :] + tl.load(bias_ptr + col)[None, :]
        other = other * inverse * tl.load(weight_ptr + pair)[None, :] + tl.load(bias_ptr + pair)[None, :]
    angle = (row // heads)[:, None] * angle_row + (col % HALF)[None, :]
    turned = present[:, None] & (col < 2 * HALF)[None, :]
    cos, sin = tl.load(cos_ptr + angle, turned, other=1.0), tl.load(sin_ptr + angle, turned, other=0.0)
    rotated = x * cos + tl.where(col < HALF, -1.0, 1.0)[None, :] * other * sin
    bits = col[:, None] & col[None, :]
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    signs = (1.0 - 2.0 * (bits & 1).to(tl.float32)).to(tl.bfloat16)
    data, scale = quantise(tl.dot(rotated.to(tl.bfloat16), signs) * ROOT)
    if STORE:
        slot = tl.load(slots_ptr + row, present, other=0)
        to, scale_to = slot // PAGE * out_stride + slot % PAGE * WIDTH, slot // PAGE * scale_stride + slot % PAGE
    else:
        to, scale_to = row * WIDTH, row
        scale *= tl.load(weight_ptr + row, present, other=0.0)
    tl.store(out_ptr + to[:, None] + col[None, :], data, present[:, None])
    tl.store(scales_ptr + scale_to, scale, present)


def masked(logits: Tensor, lens: Tensor) -> Tensor:
    rows, width = logits.shape
    if rows and width:
        _mask[(rows, triton.cdiv(width, BLOCK_MASKED))](
            logits, lens, width, logits.stride(0), BLOCK=BLOCK_MASKED, num_warps=4
        )
    return logits


@triton.jit(do_not_specialize=["width", "logits_row"], do_not_specialize_on_alignment=["lens_ptr"])
def _mask(logits_ptr, lens_ptr, width, logits_row, BLOCK: tl.constexpr):
    """Reads nothing but the length; a block before it has nothing to do."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    length = tl.load(lens_ptr + row)
    if first + BLOCK > length:
        at = first + tl.arange(0, BLOCK)
        nothing = tl.full((BLOCK,), -float("inf"), tl.float32)
        tl.store(logits_ptr + row * logits_row + at, nothing, (at >= length) & (at < width))


def chosen_rows(keys: Tensor, lens: Tensor, topk: int, page_table: Tensor, page_size: int, page_rows: int) -> Tensor:
    tokens, found = keys.shape
    out = torch.empty(tokens, topk, dtype=torch.int32, device=keys.device)
    assert keys.is_contiguous() and page_table.stride(1) == 1, (keys.stride(), page_table.stride())
    if tokens:
        _chosen[(tokens, triton.cdiv(topk, BLOCK_CHOSEN))](
            out, keys, lens, page_table,
            found, topk, page_table.stride(0) if page_table.shape[0] > 1 else 0, page_rows,
            PAGE=page_size, BLOCK=BLOCK_CHOSEN, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["page_table_row"], do_not_specialize_on_alignment=["page_table_ptr", "lens_ptr"])
def _chosen(
    out_ptr, keys_ptr, lens_ptr, page_table_ptr,
    found, topk, page_table_row, page_rows,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of few keys all, in their order, wherever top-k has left them."""
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lens_ptr + token)
    there = (at < found) & (at < length)
    key = tl.load(keys_ptr + token * found + at, there, other=0)
    key = tl.where(length <= topk, at.to(tl.int64), key)
    page = tl.load(page_table_ptr + token * page_table_row + key // PAGE, there, other=0)
    row = page * page_rows + (key % PAGE).to(tl.int32)
    tl.store(out_ptr + token * topk + at, tl.where(there, row, -1), at < topk)


def mla_sparse(q: Tensor, kv: Tensor, chosen: Tensor, lens: Tensor, scale: float, kv_lora_rank: int) -> Tensor:
    """A row is a page of its own."""
    out, _ = mla_decode(q.unsqueeze(1), pool_rows(kv).unsqueeze(1), chosen, lens, scale, kv_lora_rank)
    return out.squeeze(1)
