"""out = silu(gate) * up, where x = [gate | up]"""

from __future__ import annotations

from torch import Tensor

from millrace_kernels.backend import implementation


def silu_mul(x: Tensor) -> Tensor:
    """x [T, 2I] -> [T, I]"""
    assert x.shape[-1] % 2 == 0, x.shape
    return implementation("silu_mul.silu_mul", x.device)(x)
