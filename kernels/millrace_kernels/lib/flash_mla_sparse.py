"""FlashMLA's sparse kernel for sm90: rows of 576 in BF16, values of 512, 64 or 128 heads, a multiple of 128 keys.

It reads rows of one distance, so the pool is given as rows, other layers' among them. It finds a row in 64 bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.lib.flash_mla import LATENT, ROW
from millrace_kernels.mla_sparse import pool_rows
from millrace_kernels.triton import indexer as ours

HEADS, KEYS = (64, 128), 128
# An H200 took 56 us for 64 heads of 1 to 8 tokens, which see 2,048 keys each: a program has all keys of 64 heads. So it
# is estimated that our kernel, which splits the keys up, is faster for up to 32 tiles of 16 heads.
FEW_TILES = 32


def is_slower(tokens: int, shape: tuple[int, ...]) -> bool:
    """Than our kernel. shape: heads"""
    return tokens * -(-shape[0] // 16) <= FEW_TILES


def mla_sparse(q: Tensor, kv: Tensor, chosen: Tensor, lens: Tensor, scale: float, kv_lora_rank: int) -> Tensor:
    if not _takes(q, kv, chosen, kv_lora_rank):
        return ours.mla_sparse(q, kv, chosen, lens, scale, kv_lora_rank)
    import flash_mla

    num_heads, rows = q.shape[1], pool_rows(kv).unsqueeze(1)
    padded = next(heads for heads in HEADS if num_heads <= heads)
    if padded > num_heads:
        q = F.pad(q, (0, 0, 0, padded - num_heads))
    out, _, _ = flash_mla.flash_mla_sparse_fwd(
        q, rows, chosen.unsqueeze(1), scale, kv_lora_rank, use_legacy=True, return_log2_lse=False
    )
    return out[:, :num_heads]


def _takes(q: Tensor, kv: Tensor, chosen: Tensor, kv_lora_rank: int) -> bool:
    import flash_mla

    shapes = q.shape[2] == ROW and kv_lora_rank == LATENT and q.shape[1] <= HEADS[-1] and chosen.shape[1] % KEYS == 0
    plain = q.dtype == kv.dtype == torch.bfloat16 and q.is_contiguous() and kv.data_ptr() % 16 == 0
    return shapes and plain and len(q) > 0 and flash_mla.has_legacy()
