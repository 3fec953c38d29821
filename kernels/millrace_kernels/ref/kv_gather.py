from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millrace_kernels.ref.mla_decode import pages_of


def kv_gather(kv: Tensor, page_table: Tensor, starts: Sequence[int], lens: Sequence[int]) -> Tensor:
    page_size, width = kv.shape[1:]
    dtype = torch.bfloat16 if kv.dtype == torch.float8_e4m3fn else kv.dtype
    parts = [kv.new_empty(0, width, dtype=dtype)]
    for row, start, num in zip(page_table, starts, lens, strict=True):
        first, last = start // page_size, -(-(start + num) // page_size)
        parts.append(pages_of(kv, row[first:last].long()).reshape(-1, width)[:num].to(dtype))
    return torch.cat(parts)
