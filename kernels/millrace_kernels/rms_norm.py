"""out = x / sqrt(mean(x^2) + eps) * weight, statistics in FP32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.backend import SMALL_TOKENS, implementation
from millrace_kernels.fp8 import Operand, reference_quant_groups


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, D], weight [D] -> [T, D] in x's dtype. Rows may be strided; the last dimension is contiguous."""
    assert x.shape[-1] == weight.shape[0], (x.shape, weight.shape)
    run = implementation("rms_norm.rms_norm", x.device, x.shape[0])
    return run(x, weight, eps) if run else F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): the sum is rounded to x's dtype before it is normed."""
    assert x.shape == residual.shape and x.shape[-1] == weight.shape[0], (x.shape, residual.shape, weight.shape)
    if run := implementation("rms_norm.add_rms_norm", x.device, x.shape[0]):
        return run(x, residual, weight, eps)
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float, *, plain: bool = True) -> Operand:
    """operand(rms_norm(x)) in one pass: quantised above SMALL_TOKENS tokens.

    plain: False leaves the plain form out where the result is quantised and bfloat16, as `linear` assumes.
    """
    assert x.shape[-1] == weight.shape[0], (x.shape, weight.shape)
    if run := implementation("rms_norm.rms_norm_quant", x.device, x.shape[0]):
        return run(x, weight, eps, plain)
    return reference_operand(F.rms_norm(x, weight.shape, weight, eps), plain)


def add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, plain: bool = True
) -> tuple[Operand, Tensor]:
    """(operand(rms_norm(x + residual)), x + residual) in one pass, as add_rms_norm and rms_norm_quant."""
    assert x.shape == residual.shape and x.shape[-1] == weight.shape[0], (x.shape, residual.shape, weight.shape)
    if run := implementation("rms_norm.add_rms_norm_quant", x.device, x.shape[0]):
        return run(x, residual, weight, eps, plain)
    total = x + residual
    return reference_operand(F.rms_norm(total, weight.shape, weight, eps), plain), total


def reference_operand(x: Tensor, plain: bool) -> Operand:
    if x.shape[0] <= SMALL_TOKENS:
        return Operand(x, None)
    return Operand(x if plain or x.dtype != torch.bfloat16 else None, reference_quant_groups(x))
