"""out = x / sqrt(mean(x^2) + eps) * weight, statistics in FP32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.backend import SMALL_TOKENS, implementation
from millrace_kernels.fp8 import Operand, reference_quant_groups


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, quant: bool = False, plain: bool = True
) -> tuple[Operand, Tensor]:
    """The norm of x + residual, and that sum, rounded to x's dtype before it is normed; without a residual, of x.

    Args:
        x, residual: [T, D], rows may be strided, the last dimension is contiguous; weight: [D].
        quant: for an FP8 product: above SMALL_TOKENS tokens also in FP8, in the same pass.
        plain: False leaves the plain form out where the result is quantised and bfloat16, as `linear` assumes.
    """
    assert x.shape[-1] == weight.shape[0], (x.shape, weight.shape)
    assert residual is None or x.shape == residual.shape, (x.shape, residual)
    if run := implementation("rms_norm.rms_norm", x.device, x.shape[0]):
        return run(x, residual, weight, eps, quant, plain)
    total = x if residual is None else x + residual
    return reference_norm(total, weight, eps, quant, plain), total


def reference_norm(x: Tensor, weight: Tensor, eps: float, quant: bool, plain: bool) -> Operand:
    out = F.rms_norm(x, weight.shape, weight, eps)
    if not quant or x.shape[0] <= SMALL_TOKENS:
        return Operand(out, None)
    return Operand(out if plain or x.dtype != torch.bfloat16 else None, reference_quant_groups(out))
