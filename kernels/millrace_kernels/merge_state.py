"""Attention over two disjoint sets of keys, combined by their log-sum-exp.

lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
"""

import torch
from torch import Tensor

from millrace_kernels.backend import implementation


def merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """out_* [T, H, V], lse_* float32 [T, H]. A side with lse -inf saw no key; both: out 0, lse -inf."""
    assert out_a.shape == out_b.shape and lse_a.shape == lse_b.shape == out_a.shape[:-1]
    if run := implementation("merge_state.merge_state", out_a.device):
        return run(out_a, lse_a, out_b, lse_b)
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse == -torch.inf, 0.0)  # -inf - -inf is NaN
    weight_a, weight_b = (lse_a - base).exp().unsqueeze(-1), (lse_b - base).exp().unsqueeze(-1)
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse
