"""Absorbed MLA attention to chosen rows of the pool: `mla_decode` over the keys that the indexer chose.

out_i = sum_j softmax_j(scale * q_i . kv_j) c_kv_j        j over the slots of token i
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_kernels.backend import implementation
from millrace_kernels.mla_decode import mla_decode

GATHERED_BYTES = 1 << 28  # of rows that are copied at a time


def mla_sparse(q: Tensor, kv: Tensor, slots: Tensor, scale: float, kv_lora_rank: int) -> Tensor:
    """
    Args:
        q: [T, H, C+R].
        kv: [num_pages, page_size, C+R], one layer of the pool; pages may lie apart, a page is contiguous.
        slots: int32 [T, K], page * page_size + offset, each at most once in a row; -1: none. One at least in each row.
        kv_lora_rank: C.
    Returns:
        [T, H, C] in q's dtype.
    """
    assert q.shape[0] == slots.shape[0] and q.shape[2] == kv.shape[2], (q.shape, slots.shape, kv.shape)
    if run := implementation("mla_sparse.mla_sparse", q.device, q.shape[0]):
        return run(q, kv, slots, scale, kv_lora_rank)
    return by_copies(q, kv, slots, scale, kv_lora_rank)


def by_copies(q: Tensor, kv: Tensor, slots: Tensor, scale: float, kv_lora_rank: int) -> Tensor:
    """Copies the chosen rows side by side and attends to them as to a sequence of each token's own."""
    (tokens, topk), (_, page_size, width) = slots.shape, kv.shape
    pages, rows = -(-topk // page_size), kv.view(torch.uint8) if kv.itemsize == 1 else kv
    out, block = q.new_empty(*q.shape[:2], kv_lora_rank), max(GATHERED_BYTES // (topk * width * kv.itemsize), 1)
    for start in range(0, tokens, block):
        part = slots[start : start + block].sort(dim=1, descending=True).values.long()  # chosen ones first
        lens, part = (part >= 0).sum(1, dtype=torch.int32), part.clamp(min=0)
        copy = rows.new_empty(len(part), pages * page_size, width)
        copy[:, :topk] = rows[part // page_size, part % page_size]
        table = torch.arange(len(part) * pages, dtype=torch.int32, device=q.device).view(len(part), pages)
        copied = copy.view(kv.dtype).view(-1, page_size, width)
        found, _ = mla_decode(q[start : start + block].unsqueeze(1), copied, table, lens, scale, kv_lora_rank)
        out[start : start + block] = found[:, 0]
    return out
