"""FlashMLA's sparse kernel for sm90: rows of 576 in BF16, values of 512, 64 or 128 heads, a multiple of 128 keys.

Its keys are rows of one stride, and ours lie in pages that are apart. So it gets overlapping rows, with a stride that
divides the rows' and the pages' distance. It multiplies by the stride in 64 bits; the numbers of rows have 32.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.lib.flash_mla import LATENT, ROW
from millrace_kernels.mla_sparse import by_copies

HEADS, KEYS = (64, 128), 128


def mla_sparse(q: Tensor, kv: Tensor, slots: Tensor, scale: float, kv_lora_rank: int) -> Tensor:
    if not _takes(q, kv, slots, kv_lora_rank):
        return by_copies(q, kv, slots, scale, kv_lora_rank)
    import flash_mla

    num_heads, rows = q.shape[1], overlapping(kv)
    padded = next(heads for heads in HEADS if num_heads <= heads)
    if padded > num_heads:
        q = F.pad(q, (0, 0, 0, padded - num_heads))
    indices = row_numbers(slots, kv, rows.stride(0))
    out, _, _ = flash_mla.flash_mla_sparse_fwd(
        q, rows, indices.unsqueeze(1), scale, kv_lora_rank, use_legacy=True, return_log2_lse=False
    )
    return out[:, :num_heads]


def overlapping(kv: Tensor) -> Tensor:
    """kv [num_pages, page_size, ROW] -> [N, 1, ROW] over the same memory, every row of kv among them."""
    num_pages, page_size, width = kv.shape
    step = math.gcd(width, kv.stride(0))
    count = ((num_pages - 1) * kv.stride(0) + (page_size - 1) * width) // step + 1
    return kv.as_strided((count, 1, width), (step, width, 1))


def row_numbers(slots: Tensor, kv: Tensor, step: int) -> Tensor:
    """int32: slots -> rows of `overlapping`; -1 stays."""
    page_size = kv.shape[1]
    pages = slots.div(page_size, rounding_mode="floor")
    apart = kv.stride(0) // step - page_size * (ROW // step)  # of one page's end and the next page's begin
    return torch.where(slots < 0, slots, slots * (ROW // step) + pages * apart)


def _takes(q: Tensor, kv: Tensor, slots: Tensor, kv_lora_rank: int) -> bool:
    import flash_mla

    shapes = q.shape[2] == ROW and kv_lora_rank == LATENT and q.shape[1] <= HEADS[-1] and slots.shape[1] % KEYS == 0
    plain = q.dtype == kv.dtype == torch.bfloat16 and q.is_contiguous() and kv.stride()[1:] == (ROW, 1)
    aligned = kv.stride(0) % 8 == 0 and kv.data_ptr() % 16 == 0
    fits = shapes and aligned and len(kv) * kv.stride(0) // math.gcd(ROW, kv.stride(0)) < 1 << 31
    return fits and plain and len(q) > 0 and flash_mla.has_legacy()
