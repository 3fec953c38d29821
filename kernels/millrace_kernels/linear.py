"""out = x w^T"""

from __future__ import annotations

from torch import Tensor

from millrace_kernels.backend import implementation


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K], weight [N, K] -> [T, N], accumulated in FP32."""
    assert x.shape[-1] == weight.shape[1], (x.shape, weight.shape)
    return implementation("linear.linear", x.device)(x, weight)
