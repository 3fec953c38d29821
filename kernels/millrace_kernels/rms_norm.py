"""out = x / sqrt(mean(x^2) + eps) * weight, statistics in FP32."""

from __future__ import annotations

from torch import Tensor

from millrace_kernels.backend import implementation
from millrace_kernels.fp8 import Operand


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, D], weight [D] -> [T, D] in x's dtype. Rows may be strided; the last dimension is contiguous."""
    assert x.shape[-1] == weight.shape[0], (x.shape, weight.shape)
    return implementation("rms_norm.rms_norm", x.device, x.shape[0])(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): the sum is rounded to x's dtype before it is normed."""
    assert x.shape == residual.shape and x.shape[-1] == weight.shape[0], (x.shape, residual.shape, weight.shape)
    return implementation("rms_norm.add_rms_norm", x.device, x.shape[0])(x, residual, weight, eps)


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float, *, plain: bool = True) -> Operand:
    """operand(rms_norm(x)) in one pass: quantised above SMALL_TOKENS tokens.

    plain: False leaves the plain form out where the result is quantised and bfloat16, as `linear` assumes.
    """
    assert x.shape[-1] == weight.shape[0], (x.shape, weight.shape)
    return implementation("rms_norm.rms_norm_quant", x.device, x.shape[0])(x, weight, eps, plain)


def add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, plain: bool = True
) -> tuple[Operand, Tensor]:
    """(operand(rms_norm(x + residual)), x + residual) in one pass, as add_rms_norm and rms_norm_quant."""
    assert x.shape == residual.shape and x.shape[-1] == weight.shape[0], (x.shape, residual.shape, weight.shape)
    return implementation("rms_norm.add_rms_norm_quant", x.device, x.shape[0])(x, residual, weight, eps, plain)
