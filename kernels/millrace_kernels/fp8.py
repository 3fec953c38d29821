"""FP8 E4M3 with block scales, as DeepSeek-V3 was trained and published: real value = FP8 value * scale.

Activations carry one scale per row and 128 columns, weights one per 128 x 128 block (`weight_scale_inv`).
Edge blocks may be smaller than 128.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from millrace_kernels.backend import implementation

BLOCK = 128
E4M3_MAX = 448.0


class Fp8(NamedTuple):
    """A quantised matrix, or a stack of them."""

    data: Tensor  # E4M3 [..., N, K]
    scales: Tensor  # float32, of 1 x 128 groups [T, K/128] or of 128 x 128 blocks [..., N/128, K/128]; any strides


class Operand(NamedTuple):
    """The rows x [T, K] that a GEMM multiplies, in the forms that were worth making; at least one is there."""

    plain: Tensor | None
    fp8: Fp8 | None


def quant_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> E4M3 [T, K], scales float32 [T, ceil(K/128)]. scale = max|x| / 448, or 1 for a group of zeros."""
    return implementation("fp8.quant_groups", x.device)(x)


def quant_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> E4M3 [N, K], scales float32 [ceil(N/128), ceil(K/128)]."""
    return implementation("fp8.quant_blocks", weight.device)(weight)


def dequant_blocks(
    weight: Tensor, scales: Tensor, dtype: torch.dtype, first_row: int = 0, first_col: int = 0
) -> Tensor:
    """weight E4M3 [N, K] -> [N, K] in dtype.

    `scales` belong to the blocks that the slice touches; first_row and first_col are where the slice begins inside
    of the first of them, so a rank's shard need not begin at a block.
    """
    assert 0 <= first_row < BLOCK and 0 <= first_col < BLOCK, (first_row, first_col)
    return implementation("fp8.dequant_blocks", weight.device)(weight, scales, dtype, first_row, first_col)


def fp8_linear(x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """out = sum over 128-column blocks of (x_blk w_blk^T) * x_scale * w_scale, accumulated in FP32.

    Args:
        x: E4M3 [T, K]; x_scales: float32 [T, ceil(K/128)].
        weight: E4M3 [N, K]; w_scales: float32 [ceil(N/128), ceil(K/128)].
    Returns:
        [T, N] in dtype.
    """
    assert x.shape[1] == weight.shape[1] and x_scales.shape[1] == w_scales.shape[1], (x.shape, weight.shape)
    return implementation("fp8.fp8_linear", x.device)(x, x_scales, weight, w_scales, dtype)
