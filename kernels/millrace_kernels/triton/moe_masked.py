"""SwiGLU and quantisation between the masked products of experts, of the rows that came alone."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, Fp8
from millrace_kernels.gpu import sms
from millrace_kernels.triton.quant import quantise

ROWS = 16  # of a tile
PER_SM = 8  # programs


@triton.jit
def _silu_mul_quant_kernel(x_ptr, counts_ptr, out_ptr, scales_ptr, num_rows, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """An expert's programs walk over its tiles of ROWS rows and 128 columns."""
    expert = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + expert)
    i, col = tl.arange(0, ROWS), tl.arange(0, 128)
    columns: tl.constexpr = SIZE // 128
    tiles = (count + ROWS - 1) // ROWS * columns
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        row, column = tile // columns * ROWS + i, tile % columns
        real, wide = row < count, (expert * num_rows + row)[:, None]
        at = wide * (2 * SIZE) + column * 128 + col[None, :]
        gate = tl.load(x_ptr + at, mask=real[:, None], other=0.0).to(tl.float32)
        up = tl.load(x_ptr + at + SIZE, mask=real[:, None], other=0.0).to(tl.float32)
        out, scale = quantise(gate * tl.sigmoid(gate) * up)
        tl.store(out_ptr + wide * SIZE + column * 128 + col[None, :], out, mask=real[:, None])
        tl.store(scales_ptr + (expert * columns + column) * num_rows + row, scale, mask=real)


def silu_mul_quant(x: Tensor, counts: Tensor) -> Fp8:
    """x bfloat16 [E, M, 2I] -> silu(gate) * up, E4M3 [E, M, I], and scales [E, M, I/128], for the first counts[e] rows.

    The scales of an expert lie column by column.
    """
    held, num_rows, size = x.shape[0], x.shape[1], x.shape[2] // 2
    assert size % BLOCK == 0 and x.is_contiguous(), x.shape
    out = torch.empty(held, num_rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(held, size // BLOCK, num_rows, dtype=torch.float32, device=x.device)
    most = triton.cdiv(num_rows, ROWS) * (size // BLOCK)
    grid = (held, min(triton.cdiv(sms() * PER_SM, held), most))
    _silu_mul_quant_kernel[grid](x, counts, out, scales, num_rows, size, ROWS, num_warps=4)
    return Fp8(out, scales.transpose(1, 2))
