from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import Operand
from millrace_kernels.ref.fp8 import quant_groups


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul_quant(x: Tensor) -> Operand:
    out = silu_mul(x)
    return Operand(out, None) if x.shape[0] <= SMALL_TOKENS else Operand(None, quant_groups(out))
