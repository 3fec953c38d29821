"""out = silu(gate) * up, where x = [gate | up] and silu(v) = v / (1 + exp(-v))"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.backend import SMALL_TOKENS, implementation
from millrace_kernels.fp8 import Operand, reference_quant_groups


def silu_mul(x: Tensor) -> Tensor:
    """x [T, 2I] -> [T, I]"""
    assert x.shape[-1] % 2 == 0, x.shape
    run = implementation("silu_mul.silu_mul", x.device, x.shape[0])
    return run(x) if run else reference_silu_mul(x)


def silu_mul_quant(x: Tensor) -> Operand:
    """x [T, 2I] -> silu_mul(x) [T, I] for an FP8 product: plain up to SMALL_TOKENS tokens, above quantised only."""
    assert x.dim() == 2 and x.shape[-1] % 2 == 0, x.shape
    if run := implementation("silu_mul.silu_mul_quant", x.device, x.shape[0]):
        return run(x)
    out = reference_silu_mul(x)
    return Operand(out, None) if x.shape[0] <= SMALL_TOKENS else Operand(None, reference_quant_groups(out))


def reference_silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
