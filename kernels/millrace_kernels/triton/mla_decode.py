"""Split-KV decoding: a program takes BLOCK_M of the S * H query rows of a sequence and a share of its keys; a second
kernel merges the shares by their log-sum-exp. Any number of heads. Faster than FlashMLA for few sequences, which give
that few tiles of 64 rows; and what runs where it is missing.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.backend import KernelPlan
from millrace_kernels.gpu import fitting, sms
from millrace_kernels.triton.softmax import LOG2E, begin, finish, fold

MAX_SPLITS = 128
WIDE = 2 * 576  # bytes of a row of V3 in BF16
MERGE_COLUMNS = 64  # of a program


class MlaDecodeConfig(NamedTuple):
    block_m: int  # query rows of a program
    block_n: int  # keys at a time; what shared memory holds bounds it
    programs: int  # to which the keys of few sequences are split up
    num_warps: int
    num_stages: int


def config(rows: int, dtype: torch.dtype) -> MlaDecodeConfig:
    """The configuration for S * H query rows in dtype."""
    most = 64 if fitting(2, 64 * WIDE) == 2 else 32  # the rows of the query lie in shared memory too
    block_m = max(16, min(most, triton.next_power_of_2(rows)))
    warps, programs = 8 if block_m == 64 else 4, 2 * sms()
    if dtype == torch.float32:
        return MlaDecodeConfig(block_m, 16, programs, warps, 1)
    return MlaDecodeConfig(block_m, 32, programs, warps, fitting(2, 32 * WIDE, block_m * WIDE))


def mla_decode(
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int,
    plan: KernelPlan = None,
    chosen: MlaDecodeConfig | None = None,
) -> tuple[Tensor, Tensor]:
    chosen = chosen or config(q.shape[1] * q.shape[2], q.dtype)
    (num_seqs, num_queries, num_heads, width), rows = q.shape, q.shape[1] * q.shape[2]
    assert q.is_contiguous() and kv.stride(2) == page_table.stride(1) == 1, (q.stride(), kv.stride())
    out = q.new_empty(num_seqs, num_queries, num_heads, kv_lora_rank)
    lse = q.new_empty(num_seqs, num_queries, num_heads, dtype=torch.float32)
    if not num_seqs:
        return out, lse
    blocks = triton.cdiv(rows, chosen.block_m)
    page = kv.shape[1]
    block_n = chosen.block_n if page == 1 else min(page, chosen.block_n)
    most = page_table.shape[1] * page // block_n  # shares that could have a key
    splits = max(1, min(most, chosen.programs // (num_seqs * blocks), MAX_SPLITS))
    part_out = out if splits == 1 else q.new_empty(splits, *out.shape, dtype=torch.float32)
    part_lse = lse if splits == 1 else lse.new_empty(splits, *lse.shape)
    _attend[(num_seqs, blocks, splits)](
        part_out, part_lse, q, kv, page_table, seq_lens,
        scale, num_seqs, rows, num_heads, num_queries, kv.stride(0), kv.stride(1), page_table.stride(0),
        C=kv_lora_rank, R=width - kv_lora_rank, PAGE=page, BLOCK_M=chosen.block_m, BLOCK_N=block_n,
        num_warps=chosen.num_warps, num_stages=chosen.num_stages,
    )  # fmt: skip
    if splits > 1:
        columns = min(MERGE_COLUMNS, kv_lora_rank)
        _merge[(num_seqs * rows, triton.cdiv(kv_lora_rank, columns))](
            out, lse, part_out, part_lse, num_seqs * rows, splits,
            C=kv_lora_rank, COLUMNS=columns, SPLITS=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    return out, lse


@triton.jit(
    do_not_specialize=["num_seqs", "num_rows", "num_queries", "page_table_row"],
    do_not_specialize_on_alignment=["page_table_ptr", "seq_lens_ptr"],
)
def _attend(
    out_ptr, lse_ptr, q_ptr, kv_ptr, page_table_ptr, seq_lens_ptr,
    scale, num_seqs, num_rows, num_heads, num_queries, kv_page, kv_row, page_table_row,
    C: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    seq, split = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    latent, rope = tl.arange(0, C)[None, :], tl.arange(0, R)[None, :]
    present = (row < num_rows)[:, None]
    num_keys = tl.load(seq_lens_ptr + seq)
    share = tl.cdiv(tl.cdiv(num_keys, BLOCK_N), tl.num_programs(2)) * BLOCK_N
    last_key = num_keys - num_queries + row // num_heads
    q_rows = q_ptr + (seq.to(tl.int64) * num_rows + row[:, None]) * (C + R)
    q_latent = tl.load(q_rows + latent, mask=present, other=0.0)
    q_rope = tl.load(q_rows + C + rope, mask=present, other=0.0)

    largest, total = begin(BLOCK_M)
    out = tl.zeros((BLOCK_M, C), dtype=tl.float32)
    for first in range(split * share, tl.minimum((split + 1) * share, num_keys), BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        written = (key < num_keys)[:, None]  # the others may be NaN, and 0 * NaN is NaN
        if PAGE == 1:  # chosen rows (triton/indexer.py)
            pages = tl.load(page_table_ptr + seq * page_table_row + key, mask=key < num_keys, other=0).to(tl.int64)
            kv_rows = kv_ptr + pages[:, None] * kv_page
        else:
            page = tl.load(page_table_ptr + seq * page_table_row + first // PAGE).to(tl.int64)
            kv_rows = kv_ptr + page * kv_page + (key % PAGE)[:, None] * kv_row
        k_latent = tl.load(kv_rows + latent, mask=written, other=0.0).to(q_latent.dtype)
        k_rope = tl.load(kv_rows + C + rope, mask=written, other=0.0).to(q_latent.dtype)
        scores = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee")
        scores += tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
        visible = key[None, :] <= last_key[:, None]
        scores = tl.where(visible, scores * (scale * LOG2E), float("-inf"))
        weights, fade, largest, total = fold(scores, largest, total)
        out = out * fade[:, None] + tl.dot(weights.to(k_latent.dtype), k_latent, input_precision="ieee")

    out, lse = finish(out, largest, total)
    where = (split * num_seqs + seq).to(tl.int64) * num_rows + row
    tl.store(lse_ptr + where, lse, mask=row < num_rows)
    seen = present & ((split == 0) | (split * share < num_keys))  # _merge does not read a share without keys
    tl.store(out_ptr + where[:, None] * C + latent, out.to(out_ptr.dtype.element_ty), mask=seen)


@triton.jit(do_not_specialize=["num_rows", "splits"])
def _merge(
    out_ptr, lse_ptr, part_out_ptr, part_lse_ptr,
    num_rows, splits,
    C: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """COLUMNS of a row: all shares that saw a key at once."""
    row, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    lses = tl.load(part_lse_ptr + split * num_rows + row, mask=split < splits, other=float("-inf"))
    base = tl.max(lses, axis=0)
    base = tl.where(base == float("-inf"), 0.0, base)
    shares = tl.exp(lses - base)
    total = tl.sum(shares, axis=0)
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + row, tl.where(seen, base + tl.log(total), float("-inf")))
    at = (split * num_rows + row)[:, None] * C + column[None, :]
    mask = (lses > float("-inf"))[:, None] & (column < C)[None, :]
    parts = tl.load(part_out_ptr + at, mask=mask, other=0.0)
    out = tl.sum(parts * shares[:, None], axis=0) / total
    tl.store(out_ptr + row * C + column, out.to(out_ptr.dtype.element_ty), mask=column < C)
