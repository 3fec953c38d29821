"""Products for which torch's own GEMMs (cuBLAS) are the fastest, or the only implementation."""

import torch
from torch import Tensor

from millrace_kernels.fp8 import Fp8, Operand
from millrace_kernels.moe_experts import one_expert, plain_rows
from millrace_kernels.moe_gate import reference_gate_logits


def gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    """bfloat16 operands go to the tensor cores as they are; the sums leave them in FP32."""
    if x.dtype == weight.dtype == torch.bfloat16:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return reference_gate_logits(x, weight)


def moe_experts_other(
    x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Tensor | Fp8, w2: Tensor | Fp8,
    *, shared_expert: bool = False, num_experts: int = 0, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Every expert for every token, with weight 0 where the token did not choose it. That is far more products than
    needed, but the host does not read the choices, so a CUDA graph may contain it.
    """
    rows = plain_rows(x)
    held = (w13.data if isinstance(w13, Fp8) else w13).shape[0]
    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for expert in range(held):
        outputs = one_expert(rows, w13, w2, expert).float()
        if shared_expert and expert == held - 1:
            total += outputs
            continue
        chosen = experts == expert  # [T, K]
        weight = (weights * chosen).sum(1, keepdim=True)
        total += torch.where(chosen.any(1, keepdim=True), outputs * weight, 0.0)
    return total.to(rows.dtype) if out is None else out.copy_(total)
