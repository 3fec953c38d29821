from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import Operand
from millrace_kernels.ref.fp8 import quant_groups


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float, plain: bool = True) -> Operand:
    return _operand(rms_norm(x, weight, eps), plain)


def add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, plain: bool = True
) -> tuple[Operand, Tensor]:
    normed, total = add_rms_norm(x, residual, weight, eps)
    return _operand(normed, plain), total


def _operand(x: Tensor, plain: bool) -> Operand:
    if x.shape[0] <= SMALL_TOKENS:
        return Operand(x, None)
    return Operand(x if plain or x.dtype != torch.bfloat16 else None, quant_groups(x))
