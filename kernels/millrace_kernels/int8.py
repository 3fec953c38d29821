"""W8A8 products in INT8, for GPUs without FP8 tensor cores: real value = INT8 value * scale.

Published DeepSeek checkpoints in INT8 have one of two kinds of scales:

    by channel   a weight has one per output channel, its activations one per row: both leave the sum, which is exact,
                 as K * 127^2 stays below 2^31 for K up to 133,000
    by block     a weight has one per 128 x 128 block, its activations one per row and 128 columns, as in FP8
"""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from millrace_kernels.backend import implementation
from millrace_kernels.fp8 import BLOCK, Fp8, dequant_blocks

INT8_MAX = 127


class Int8(NamedTuple):
    """A quantised matrix, or a stack of them."""

    data: Tensor  # int8 [..., N, K]
    scales: Tensor  # float32 of rows [..., N], or of groups [..., N, K/128], or of blocks [..., N/128, K/128]

    @property
    def by_block(self) -> bool:
        return self.scales.dim() == self.data.dim()


Matrix: TypeAlias = Tensor | Fp8 | Int8  # the weight of a product


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


def quant_like(x: Tensor, weight: Int8) -> Int8:
    """x [T, K] as a product with `weight` reads it: by row, or by groups of 128 columns, which then divide K."""
    if not weight.by_block:
        return quant_rows(x)
    groups = quant_rows(x.reshape(-1, BLOCK))
    return Int8(groups.data.view(x.shape), groups.scales.view(len(x), x.shape[1] // BLOCK))


def dequant(weight: Int8, dtype: torch.dtype) -> Tensor:
    """weight int8 [N, K] -> [N, K] in dtype."""
    if weight.by_block:
        return dequant_blocks(*weight, dtype)
    return (weight.data * weight.scales[:, None]).to(dtype)


def int8_linear(x: Int8, weight: Int8, dtype: torch.dtype) -> Tensor:
    """out = sum over k of x_scale x_tk * w_scale w_nk

    Args:
        x: int8 [T, K], from `quant_like`; weight: int8 [N, K]; K is contiguous in both.
    Returns:
        [T, N] in dtype; the sum is exact in INT32 over K, or over the columns of a block.
    """
    (num_tokens, k), (n, k_too), groups = x.data.shape, weight.data.shape, -(-x.data.shape[1] // BLOCK)
    assert k == k_too and k * INT8_MAX**2 < 2**31, (x.data.shape, weight.data.shape)
    wanted = ((num_tokens, groups), (-(-n // BLOCK), groups)) if weight.by_block else ((num_tokens,), (n,))
    assert (x.scales.shape, weight.scales.shape) == wanted, (x.scales.shape, weight.scales.shape, wanted)
    if run := implementation("int8.int8_linear", x.data.device, num_tokens, (n, k)):
        return run(x, weight, dtype)
    if not weight.by_block:
        total = x.data.double() @ weight.data.double().t()  # exact in float64
        return (total * x.scales[:, None] * weight.scales).to(dtype)
    scaled = x.data.double() * x.scales.repeat_interleave(BLOCK, 1)
    return (scaled @ dequant_blocks(*weight, torch.float32).double().t()).to(dtype)
