from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def kv_gather(kv: Tensor, page_table: Tensor, starts: Sequence[int], lens: Sequence[int]) -> Tensor:
    page_size, width = kv.shape[1:]
    if kv.dtype == torch.float8_e4m3fn:
        kv = kv.bfloat16()  # exact
    pages = kv.flatten(1)
    parts = [kv.new_empty(0, width)]
    for row, start, num in zip(page_table, starts, lens, strict=True):
        first, last = start // page_size, -(-(start + num) // page_size)
        parts.append(F.embedding(row[first:last].long(), pages).view(-1, width)[:num])
    return torch.cat(parts)
