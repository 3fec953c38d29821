from __future__ import annotations

import torch
from torch import Tensor

from millrace_kernels.fp8 import E4M3_MAX


def kv_store(kv: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
    page_size = kv.shape[1]
    rows = torch.cat((c_kv, k_pe), dim=-1)
    if kv.dtype == torch.float8_e4m3fn:
        rows = rows.clamp(-E4M3_MAX, E4M3_MAX).to(kv.dtype).view(torch.uint8)  # beyond it the conversion makes NaN
        kv = kv.view(torch.uint8)
    kv[slots // page_size, slots % page_size] = rows.to(kv.dtype)
