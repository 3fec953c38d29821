"""FlashMLA's dense decode kernels for sm90: rows of 576, values of 512, pages of 64, BF16 or E4M3. Any number of heads:
its tiles of 64 query rows are clipped. And its sparse kernel: BF16, 64 or 128 heads, a multiple of 128 keys. That one
reads rows of one distance, so the pool is given as rows, other layers' among them, which it finds in 64 bits.

Facts of its sources that its documentation lacks:
- A sequence of length 0 is one empty block for the BF16 kernel, which gives out 0 and lse +inf but touches the page of
  the first table entry. The FP8 kernel would read the table before its row, so its lengths are at least 1.
- The FP8 kernel hides keys in the last two blocks of 64 alone. Of more than 64 queries the first would see keys that
  come after them: their errors were up to 4 times the result. So callers pass pieces (`mla_decode.most_queries`).
- It uses programmatic dependent launch without waiting for the kernel before it, and the kernel that merges splits may
  end before the main one. So the kernels before and after it are launched plainly, as all of ours are.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.mla_decode import most_queries
from millrace_kernels.mla_sparse import pool_rows
from millrace_kernels.triton import indexer as ours_sparse
from millrace_kernels.triton import mla_decode as ours
from millrace_kernels.triton.e4m3 import to_e4m3

ROW, LATENT, PAGE = 576, 512, 64
KV_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
FEW_SEQS, FEW_ROWS = 4, 32  # up to so many sequences our kernel is faster, with at most half a tile of query rows each
# Rows that one sequence may have: FlashMLA took 22.8 us for them behind 1,024 keys, ours 10.6 for half of them.
TILE = 64
HEADS, KEYS = (64, 128), 128
# An H200 took 56 us for 64 heads of 1 to 8 tokens, which see 2,048 keys each: a program has all keys of 64 heads. So it
# is estimated that our kernel, which splits the keys up, is faster for up to 32 tiles of 16 heads.
FEW_TILES = 32


@dataclass(frozen=True, slots=True)
class FlashMlaPlan:
    seq_lens: Tensor  # int32 [B]
    metadata: Any  # FlashMLASchedMeta: which blocks of which sequence each multiprocessor takes


def schedule(seq_lens: Tensor, queries_per_seq: int, num_heads: int, kv_dtype: torch.dtype) -> FlashMlaPlan | None:
    """One kernel on one warp, for all layers. None: our kernel runs."""
    rows = queries_per_seq * num_heads
    if len(seq_lens) <= FEW_SEQS and rows <= (TILE if len(seq_lens) == 1 else FEW_ROWS):
        return None
    import flash_mla
    from flash_mla.flash_mla_interface import FlashMLASchedMeta

    taken = len(seq_lens) and kv_dtype in KV_DTYPES and queries_per_seq <= most_queries(kv_dtype)
    if not taken or not flash_mla.has_legacy():
        return None
    fp8 = kv_dtype == torch.float8_e4m3fn
    lens = seq_lens.clamp_min(1) if fp8 else seq_lens
    tiles, splits = flash_mla.get_mla_decoding_metadata(
        lens, rows, 1, None if fp8 else num_heads, is_fp8_kvcache=fp8, use_legacy=True
    )
    return FlashMlaPlan(lens, FlashMLASchedMeta(tile_scheduler_metadata=tiles, num_splits=splits))


def mla_decode(
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int,
    plan: FlashMlaPlan | None = None,
) -> tuple[Tensor, Tensor]:
    taken = _takes(q, kv, kv_lora_rank)
    if not taken or (plan := plan or schedule(seq_lens, q.shape[1], q.shape[2], kv.dtype)) is None:
        return ours.mla_decode(q, kv, page_table, seq_lens, scale, kv_lora_rank)
    import flash_mla

    fp8 = kv.dtype == torch.float8_e4m3fn
    one = _one(q.device) if fp8 else None
    out, lse = flash_mla.flash_mla_with_kvcache(
        to_e4m3(q) if fp8 else q,
        kv.unsqueeze(2),
        page_table,
        plan.seq_lens,
        kv_lora_rank,
        plan.metadata,
        softmax_scale=scale,
        causal=True,
        is_fp8_kvcache=fp8,
        use_legacy=True,
        descale_q=one,
        descale_k=one,
    )
    return out, lse.transpose(1, 2)  # [B, H, S] there


def _takes(q: Tensor, kv: Tensor, kv_lora_rank: int) -> bool:
    shapes = q.shape[3] == ROW and kv_lora_rank == LATENT and kv.shape[1] == PAGE
    dtypes = q.dtype == torch.bfloat16 and kv.dtype in KV_DTYPES
    aligned = kv.stride(0) * kv.itemsize % 16 == 0 and kv.data_ptr() % 16 == 0  # as its copies are
    return shapes and dtypes and aligned and kv.stride()[1:] == (ROW, 1)


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, device=device)


def sparse_is_slower(tokens: int, shape: tuple[int, ...]) -> bool:
    """Than our kernel. shape: heads"""
    return tokens * -(-shape[0] // 16) <= FEW_TILES


def mla_sparse(q: Tensor, kv: Tensor, chosen: Tensor, lens: Tensor, scale: float, kv_lora_rank: int) -> Tensor:
    if not _takes_sparse(q, kv, chosen, kv_lora_rank):
        return ours_sparse.mla_sparse(q, kv, chosen, lens, scale, kv_lora_rank)
    import flash_mla

    num_heads, rows = q.shape[1], pool_rows(kv).unsqueeze(1)
    padded = next(heads for heads in HEADS if num_heads <= heads)
    if padded > num_heads:
        q = F.pad(q, (0, 0, 0, padded - num_heads))
    out, _, _ = flash_mla.flash_mla_sparse_fwd(
        q, rows, chosen.unsqueeze(1), scale, kv_lora_rank, use_legacy=True, return_log2_lse=False
    )
    return out[:, :num_heads]


def _takes_sparse(q: Tensor, kv: Tensor, chosen: Tensor, kv_lora_rank: int) -> bool:
    import flash_mla

    shapes = q.shape[2] == ROW and kv_lora_rank == LATENT and q.shape[1] <= HEADS[-1] and chosen.shape[1] % KEYS == 0
    plain = q.dtype == kv.dtype == torch.bfloat16 and q.is_contiguous() and kv.data_ptr() % 16 == 0
    return shapes and plain and len(q) > 0 and flash_mla.has_legacy()
