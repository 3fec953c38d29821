from __future__ import annotations

import torch
from torch import Tensor

from millrace_kernels.ref.rope import rope


def expand_kv(up: Tensor, k_pe: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    k_pe = k_pe.unsqueeze(1).expand(-1, up.shape[1], -1)
    return torch.cat((up[..., :nope], k_pe), dim=-1), up[..., nope:]


def rope_q(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pe = q[..., -2 * cos.shape[1] :]
    pe.copy_(rope(pe, cos, sin))
    return q
