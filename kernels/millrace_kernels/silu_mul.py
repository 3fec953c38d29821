"""out = silu(gate) * up, where x = [gate | up] and silu(v) = v / (1 + exp(-v))"""

import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.backend import SMALL_TOKENS, implementation
from millrace_kernels.fp8 import Operand, reference_quant_groups


def silu_mul(x: Tensor, *, quant: bool = False) -> Operand:
    """x [T, 2I] -> [T, I]. `quant`: for an FP8 product, above SMALL_TOKENS tokens quantised only; else plain."""
    assert x.dim() == 2 and x.shape[-1] % 2 == 0, x.shape
    if run := implementation("silu_mul.silu_mul", x.device, x.shape[0]):
        return run(x, quant)
    out = reference_silu_mul(x)
    return Operand(None, reference_quant_groups(out)) if quant and len(x) > SMALL_TOKENS else Operand(out, None)


def reference_silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
