"""out = the pool rows of a token range of each sequence, back to back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from millrace_kernels.backend import implementation
from millrace_kernels.mla_decode import pages_of


def kv_gather(kv: Tensor, page_table: Tensor, starts: Sequence[int], lens: Sequence[int]) -> Tensor:
    """Copies tokens [starts[b], starts[b] + lens[b]) of sequence b.

    Args:
        kv: [num_pages, page_size, W], one layer of the pool; pages may lie apart, a page is contiguous.
        page_table: int32 [B, P].
        starts: multiples of page_size, where lens[b] > 0.
    Returns:
        [sum(lens), W] in kv's dtype; bf16 for an E4M3 pool.
    """
    assert page_table.shape[0] == len(starts) == len(lens)
    assert all(start % kv.shape[1] == 0 for start, num in zip(starts, lens, strict=True) if num), starts
    if run := implementation("kv_gather.kv_gather", kv.device):
        return run(kv, page_table, starts, lens)
    page_size, width = kv.shape[1:]
    dtype = torch.bfloat16 if kv.dtype == torch.float8_e4m3fn else kv.dtype
    parts = [kv.new_empty(0, width, dtype=dtype)]
    for row, start, num in zip(page_table, starts, lens, strict=True):
        first, last = start // page_size, -(-(start + num) // page_size)
        parts.append(pages_of(kv, row[first:last].long()).reshape(-1, width)[:num].to(dtype))
    return torch.cat(parts)
