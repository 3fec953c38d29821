"""out = silu(gate) * up, where x = [gate | up] and silu(v) = v / (1 + exp(-v))"""

from __future__ import annotations

from torch import Tensor

from millrace_kernels.backend import implementation
from millrace_kernels.fp8 import Operand


def silu_mul(x: Tensor) -> Tensor:
    """x [T, 2I] -> [T, I]"""
    assert x.shape[-1] % 2 == 0, x.shape
    return implementation("silu_mul.silu_mul", x.device, x.shape[0])(x)


def silu_mul_quant(x: Tensor) -> Operand:
    """x [T, 2I] -> silu_mul(x) [T, I] for an FP8 product: plain up to SMALL_TOKENS tokens, above quantised only."""
    assert x.dim() == 2 and x.shape[-1] % 2 == 0, x.shape
    return implementation("silu_mul.silu_mul_quant", x.device, x.shape[0])(x)
