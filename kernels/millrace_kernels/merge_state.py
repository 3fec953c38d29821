"""Attention over two disjoint sets of keys, combined by their log-sum-exp.

lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
"""

from __future__ import annotations

from torch import Tensor

from millrace_kernels.backend import implementation


def merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """out_* [T, H, V], lse_* float32 [T, H]. A side with lse -inf saw no key; both: out 0, lse -inf."""
    assert out_a.shape == out_b.shape and lse_a.shape == lse_b.shape == out_a.shape[:-1]
    return implementation("merge_state.merge_state", out_a.device)(out_a, lse_a, out_b, lse_b)
