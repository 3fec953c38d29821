"""Absorbed MLA attention to chosen rows of the pool: `mla_decode` over the keys that the indexer chose.

out_i = sum_j softmax_j(scale * q_i . kv_j) c_kv_j        j over the chosen rows of token i
"""

import torch
from torch import Tensor

from millrace_kernels.backend import implementation
from millrace_kernels.mla_decode import mla_decode

COPIED_BYTES = 1 << 28  # of rows that are copied at a time


def mla_sparse(q: Tensor, kv: Tensor, chosen: Tensor, lens: Tensor, scale: float, kv_lora_rank: int) -> Tensor:
    """
    Args:
        q: [T, H, C+R].
        kv: [num_pages, page_size, C+R], one layer of the pool; a page is contiguous, and whole rows from the next one.
        chosen: int32 [T, K], rows as in `pool_rows`, -1 behind the last one.
        lens: int32 [T], how many each token has: 1 to K.
        kv_lora_rank: C.
    Returns:
        [T, H, C] in q's dtype.
    """
    assert q.shape[0] == chosen.shape[0] == lens.shape[0] and q.shape[2] == kv.shape[2], (q.shape, chosen.shape)
    if run := implementation("mla_sparse.mla_sparse", q.device, q.shape[0], q.shape[1:2]):
        return run(q, kv, chosen, lens, scale, kv_lora_rank)
    return by_copies(q, kv, chosen, lens, scale, kv_lora_rank)


def pool_rows(kv: Tensor) -> Tensor:
    """kv [num_pages, page_size, W] -> [N, W]: the pool from this layer's first row to its last one as rows, which are
    this layer's where a page begins.
    """
    (num_pages, page_size, width), page_rows = kv.shape, kv.stride(0) // kv.shape[2]
    assert kv.stride() == (page_rows * width, width, 1), f"pages are not whole rows apart: {kv.stride()}"
    return kv.as_strided(((num_pages - 1) * page_rows + page_size, width), (width, 1))


def by_copies(q: Tensor, kv: Tensor, chosen: Tensor, lens: Tensor, scale: float, kv_lora_rank: int) -> Tensor:
    """Copies the chosen rows side by side and attends to them as to a sequence of each token's own."""
    (tokens, topk), (_, page_size, width) = chosen.shape, kv.shape
    pages, pool = -(-topk // page_size), pool_rows(kv.view(torch.uint8) if kv.itemsize == 1 else kv)
    out, block = q.new_empty(*q.shape[:2], kv_lora_rank), max(COPIED_BYTES // (topk * width * kv.itemsize), 1)
    for start in range(0, tokens, block):
        part = slice(start, start + block)
        rows = chosen[part].clamp(min=0).long()
        copy = pool.new_empty(len(rows), pages * page_size, width)
        copy[:, :topk] = pool[rows]
        table = torch.arange(len(rows) * pages, dtype=torch.int32, device=q.device).view(len(rows), pages)
        copied = copy.view(kv.dtype).view(-1, page_size, width)
        found, _ = mla_decode(q[part].unsqueeze(1), copied, table, lens[part], scale, kv_lora_rank)
        out[part] = found[:, 0]
    return out
