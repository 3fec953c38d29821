from __future__ import annotations

import torch
from torch import Tensor


def kv_store(kv: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
    page_size = kv.shape[1]
    kv[slots // page_size, slots % page_size] = torch.cat((c_kv, k_pe), dim=-1).to(kv.dtype)
