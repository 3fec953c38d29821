from __future__ import annotations

import torch
from torch import Tensor


def merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse == -torch.inf, 0.0)  # -inf - -inf is NaN
    weight_a, weight_b = (lse_a - base).exp().unsqueeze(-1), (lse_b - base).exp().unsqueeze(-1)
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse
