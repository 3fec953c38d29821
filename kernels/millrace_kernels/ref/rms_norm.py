from __future__ import annotations

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


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float) -> Operand:
    return _operand(rms_norm(x, weight, eps))


def add_rms_norm_quant(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Operand, Tensor]:
    normed, total = add_rms_norm(x, residual, weight, eps)
    return _operand(normed), total


def _operand(x: Tensor) -> Operand:
    return Operand(x, quant_groups(x) if x.shape[0] > SMALL_TOKENS else None)
