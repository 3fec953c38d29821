"""out = x w^T, with a plain, an FP8 or an INT8 weight.

An FP8 weight is multiplied in one of two ways, by the number of tokens: up to SMALL_TOKENS by `small_linear`, which
reads plain rows; above by `fp8_linear`, which reads quantised rows. `operand` makes the form that is needed, so that
one quantisation serves several products; `rms_norm` and `silu_mul` make it in the same pass.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import Fp8, Operand, fp8_linear, quant_groups, small_linear
from millrace_kernels.int8 import Int8, Matrix, int8_linear, quant_like


def operand(x: Tensor) -> Operand:
    """x [T, K] and, above SMALL_TOKENS tokens, its FP8 form."""
    return Operand(x, quant_groups(x) if x.shape[0] > SMALL_TOKENS else None)


def linear(x: Tensor | Operand, weight: Matrix) -> Tensor:
    """x [T, K], weight [N, K] -> [T, N], accumulated in FP32; in the dtype of the plain x, bfloat16 without one.

    A plain or an INT8 weight needs a plain x. More tokens than SMALL_TOKENS without an FP8 form are quantised here.
    """
    plain, fp8 = x if isinstance(x, Operand) else (x, None)
    if isinstance(weight, Int8):
        assert plain is not None, "INT8 products quantise plain rows"
        return int8_linear(quant_like(plain, weight), weight, plain.dtype)
    if not isinstance(weight, Fp8):
        assert plain is not None and plain.shape[-1] == weight.shape[1], (x, weight.shape)
        return F.linear(plain, weight)
    if plain is not None and plain.shape[0] <= SMALL_TOKENS:
        return small_linear(plain, weight)
    if fp8 is None:
        assert plain is not None, "an operand without any form"
        fp8 = quant_groups(plain)
    return fp8_linear(fp8, weight, torch.bfloat16 if plain is None else plain.dtype)
