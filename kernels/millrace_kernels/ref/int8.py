from __future__ import annotations

import torch
from torch import Tensor

from millrace_kernels.int8 import INT8_MAX, Int8


def quant_rows(x: Tensor) -> Int8:
    largest = x.float().abs().amax(1) if x.shape[1] else x.new_zeros(x.shape[0], dtype=torch.float32)
    scales = torch.where(largest > 0, largest / INT8_MAX, 1.0)
    return Int8((x.float() / scales[:, None]).round().to(torch.int8), scales)


def int8_linear(x: Int8, weight: Int8, dtype: torch.dtype) -> Tensor:
    """Computed in float64, where sums of such products are exact."""
    total = x.data.double() @ weight.data.double().t()
    return (total * x.scales[:, None] * weight.scales).to(dtype)
