"""W8A8 products in INT8, for GPUs without FP8 tensor cores: real value = INT8 value * scale.

Activations carry one scale per row, weights one per output channel, so both scales leave the sum and the sum is exact:
K * 127^2 stays below 2^31 for K up to 133,000. DeepSeek-V3 is published in FP8, and no loader uses this module yet: a
loader would keep `quant_rows` of a weight and run `int8_linear(quant_rows(x), weight, dtype)`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from millrace_kernels.backend import implementation

INT8_MAX = 127


class Int8(NamedTuple):
    """A quantised matrix."""

    data: Tensor  # int8 [T, K]
    scales: Tensor  # float32 [T]


def quant_rows(x: Tensor) -> Int8:
    """x [T, K], bfloat16 or float32 -> int8 [T, K], nearest, ties to even; scale = max|x| / 127, or 1 for a row of
    zeros. For weights a row is an output channel.
    """
    assert x.dim() == 2 and x.dtype in (torch.bfloat16, torch.float32), (x.shape, x.dtype)
    if run := implementation("int8.quant_rows", x.device, x.shape[0]):
        return run(x)
    largest = x.float().abs().amax(1) if x.shape[1] else x.new_zeros(x.shape[0], dtype=torch.float32)
    scales = torch.where(largest > 0, largest / INT8_MAX, 1.0)
    return Int8((x.float() / scales[:, None]).round().to(torch.int8), scales)


def int8_linear(x: Int8, weight: Int8, dtype: torch.dtype) -> Tensor:
    """out_tn = x_scale_t * w_scale_n * sum over k of x_tk w_nk

    Args:
        x: int8 [T, K]; weight: int8 [N, K]; K is contiguous in both.
    Returns:
        [T, N] in dtype; the sum is exact in INT32.
    """
    (num_tokens, k), (n, k_too) = x.data.shape, weight.data.shape
    assert k == k_too and k * INT8_MAX**2 < 2**31, (x.data.shape, weight.data.shape)
    assert x.scales.shape == (num_tokens,) and weight.scales.shape == (n,), (x.scales.shape, weight.scales.shape)
    if run := implementation("int8.int8_linear", x.data.device, num_tokens, (n, k)):
        return run(x, weight, dtype)
    total = x.data.double() @ weight.data.double().t()  # exact in float64
    return (total * x.scales[:, None] * weight.scales).to(dtype)
