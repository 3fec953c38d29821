from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, E4M3_MAX, NOTHING, Fp8


def quant_groups(x: Tensor) -> Fp8:
    groups = _pad(x.float(), 1, BLOCK).unflatten(1, (-1, BLOCK))  # [T, K/128, 128]
    scales = _scale(groups.abs().amax(-1))
    quantized = (groups / scales.unsqueeze(-1)).flatten(1)[:, : x.shape[1]]
    return Fp8(quantized.to(torch.float8_e4m3fn), scales)


def quant_blocks(weight: Tensor) -> Fp8:
    blocks = _pad(weight.float(), BLOCK, BLOCK).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [n, 128, k, 128]
    scales = _scale(blocks.abs().amax((1, 3)))  # [n, k]
    quantized = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)
    return Fp8(quantized[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous(), scales)


def dequant_blocks(weight: Tensor, scales: Tensor, dtype: torch.dtype, first_row: int, first_col: int) -> Tensor:
    values, (n, k) = weight.to(torch.float32, memory_format=torch.contiguous_format), weight.shape
    if first_row == 0 and first_col == 0 and n % BLOCK == 0 and k % BLOCK == 0:  # the same, without a [N, K] of scales
        values.view(n // BLOCK, BLOCK, k // BLOCK, BLOCK).mul_(scales[:, None, :, None])
        return values.to(dtype)
    rows = (torch.arange(n, device=weight.device) + first_row) // BLOCK
    cols = (torch.arange(k, device=weight.device) + first_col) // BLOCK
    return values.mul_(scales[rows][:, cols]).to(dtype)


def fp8_linear(x: Fp8, weight: Fp8, dtype: torch.dtype) -> Tensor:
    row_scales = weight.scales.repeat_interleave(BLOCK, 0)[: weight.data.shape[0]]  # [N, K/128]
    out = torch.zeros(x.data.shape[0], weight.data.shape[0], dtype=torch.float32, device=x.data.device)
    for block in range(x.scales.shape[1]):
        cols = slice(block * BLOCK, (block + 1) * BLOCK)
        partial = F.linear(x.data[:, cols].float(), weight.data[:, cols].float())
        out += partial * x.scales[:, block : block + 1] * row_scales[:, block]
    return out.to(dtype)


def compile_ahead(max_tokens: int, device: torch.device, start: float = 0.0) -> int:
    return 0


def small_linear(x: Tensor, weight: Fp8) -> Tensor:
    return F.linear(x.float(), dequant_blocks(*weight, torch.float32, 0, 0)).to(x.dtype)


def _pad(x: Tensor, row_multiple: int, col_multiple: int) -> Tensor:
    return F.pad(x, (0, -x.shape[1] % col_multiple, 0, -x.shape[0] % row_multiple))


def _scale(largest: Tensor) -> Tensor:
    limit = largest.new_full((), E4M3_MAX)  # a tensor: by a number, a GPU multiplies with the rounded inverse
    return torch.where(largest > NOTHING, largest / limit, torch.ones_like(largest))
