from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, E4M3_MAX


def quant_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = _pad(x.float(), 1, BLOCK).unflatten(1, (-1, BLOCK))  # [T, K/128, 128]
    scales = _scale(groups.abs().amax(-1))
    quantized = (groups / scales.unsqueeze(-1)).flatten(1)[:, : x.shape[1]]
    return quantized.to(torch.float8_e4m3fn), scales


def quant_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    blocks = _pad(weight.float(), BLOCK, BLOCK).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [n, 128, k, 128]
    scales = _scale(blocks.abs().amax((1, 3)))  # [n, k]
    quantized = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)
    return quantized[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous(), scales


def dequant_blocks(weight: Tensor, scales: Tensor, dtype: torch.dtype, first_row: int, first_col: int) -> Tensor:
    rows = (torch.arange(weight.shape[0], device=weight.device) + first_row) // BLOCK
    cols = (torch.arange(weight.shape[1], device=weight.device) + first_col) // BLOCK
    return (weight.float() * scales[rows][:, cols]).to(dtype)


def fp8_linear(x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, dtype: torch.dtype) -> Tensor:
    row_scales = w_scales.repeat_interleave(BLOCK, 0)[: weight.shape[0]]  # [N, K/128]
    out = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    for block in range(x_scales.shape[1]):
        cols = slice(block * BLOCK, (block + 1) * BLOCK)
        partial = F.linear(x[:, cols].float(), weight[:, cols].float())
        out += partial * x_scales[:, block : block + 1] * row_scales[:, block]
    return out.to(dtype)


def _pad(x: Tensor, row_multiple: int, col_multiple: int) -> Tensor:
    return F.pad(x, (0, -x.shape[1] % col_multiple, 0, -x.shape[0] % row_multiple))


def _scale(largest: Tensor) -> Tensor:
    return torch.where(largest > 0, largest / E4M3_MAX, torch.ones_like(largest))
