"""What torch's own GEMMs (cuBLAS) do best."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_kernels.ref import moe_gate as reference


def gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    """bfloat16 operands go to the tensor cores as they are; the sums leave them in FP32."""
    if x.dtype == weight.dtype == torch.bfloat16:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return reference.gate_logits(x, weight)
