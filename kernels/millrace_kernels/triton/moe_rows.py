"""The passes around the grouped GEMMs: rows to their experts, SwiGLU with quantisation, rows back to tokens.

Scales of rows [num_rows, K/128] lie column by column, as the FP8 GEMMs of sm90 read them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, Fp8
from millrace_kernels.gpu import sms
from millrace_kernels.triton.moe_route import ExpertRoute
from millrace_kernels.triton.quant import quantise

SCALE_ROWS = 128  # whose scales a program gathers


@triton.jit(do_not_specialize=["num_tokens", "stride_scale_k"])
def _permute_kernel(
    x_ptr, scales_ptr, rows_ptr, tokens_ptr, total_ptr, out_ptr, out_scales_ptr,
    num_tokens, stride_scale_t, stride_scale_k, num_rows,
    D: tl.constexpr, D_PAD: tl.constexpr, CHOICES: tl.constexpr, CACHE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The first programs gather the scales of ROWS rows each. The others have a token each: read once, written to each
    of its rows. A token's own scales would go to a sector each, of which they are an eighth.
    """
    token = tl.program_id(0) - tl.cdiv(num_rows, ROWS)
    if token < 0:
        place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        whose = tl.load(tokens_ptr + place, mask=place < tl.load(total_ptr), other=-1)  # any token, in padding
        for first in range(0, D // 128, 8):
            column = first + tl.arange(0, 8)[:, None]
            mask = (column < D // 128) & ((whose >= 0) & (whose < num_tokens))[None, :]
            scales = tl.load(scales_ptr + whose[None, :] * stride_scale_t + column * stride_scale_k, mask=mask)
            tl.store(out_scales_ptr + column * num_rows + place[None, :], scales, mask=mask)
    else:
        col = tl.arange(0, D_PAD)
        rows, held = (), 0
        for choice in tl.static_range(CHOICES):
            row = tl.load(rows_ptr + token * CHOICES + choice)
            rows += (row,)  # type: ignore[assignment]  # Triton unrolls
            held += (row >= 0).to(tl.int32)
        if held > 0:
            x = tl.load(x_ptr + token.to(tl.int64) * D + col, mask=col < D)
            for choice in tl.static_range(CHOICES):
                to, mask = rows[choice].to(tl.int64) * D + col, (rows[choice] >= 0) & (col < D)
                tl.store(out_ptr + to, x, mask=mask, cache_modifier=CACHE)


def permute(x: Fp8, route: ExpertRoute, tokens: Tensor, out: Tensor, stream: bool = False) -> Fp8:
    """x [T, D] -> out [num_rows, D] and its scales, in the route's layout; unused rows have arbitrary content.

    tokens: Blocks.tokens of the route. stream: rows that do not fit into L2 leave it first.
    """
    num, dim = x.data.shape
    assert x.data.is_contiguous() and dim % BLOCK == 0 and out.is_contiguous(), x.data.shape
    scales = _scales(route.num_rows, dim // BLOCK, x.data.device)
    _permute_kernel[(triton.cdiv(route.num_rows, SCALE_ROWS) + num,)](
        x.data.view(torch.uint8), x.scales, route.rows, tokens, route.total, out.view(torch.uint8), scales,
        num, *x.scales.stride(), route.num_rows, dim, triton.next_power_of_2(dim), route.rows.shape[1],
        ".cs" if stream else "", SCALE_ROWS, num_warps=4,
    )  # fmt: skip
    return Fp8(out, scales)


def _scales(num_rows: int, columns: int, device: torch.device) -> Tensor:
    assert num_rows * columns < 1 << 31, (num_rows, columns)  # kernels compute their offsets in int32
    return torch.empty(columns, num_rows, dtype=torch.float32, device=device).t()


@triton.jit
def _silu_mul_quant_kernel(x_ptr, out_ptr, scales_ptr, total_ptr, num_rows, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """A fixed grid walks over the tiles of ROWS rows and 128 columns that exist."""
    i, col = tl.arange(0, ROWS), tl.arange(0, 128)
    columns: tl.constexpr = SIZE // 128
    tiles = tl.load(total_ptr) // ROWS * columns
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = tile // columns * ROWS + i, tile % columns
        wide = row.to(tl.int64)[:, None]
        at = wide * (2 * SIZE) + column * 128 + col[None, :]
        gate = tl.load(x_ptr + at).to(tl.float32)
        up = tl.load(x_ptr + at + SIZE).to(tl.float32)
        out, scale = quantise(gate * tl.sigmoid(gate) * up)
        tl.store(out_ptr + wide * SIZE + column * 128 + col[None, :], out)
        tl.store(scales_ptr + column * num_rows + row, scale)


def silu_mul_quant(x: Tensor, route: ExpertRoute) -> Fp8:
    """x [num_rows, 2I] -> silu(gate) * up [num_rows, I], up to the route's total."""
    num_rows, size, rows = x.shape[0], x.shape[1] // 2, 16
    assert size % BLOCK == 0 and num_rows % rows == 0 and x.is_contiguous(), x.shape
    out = torch.empty(num_rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = _scales(num_rows, size // BLOCK, x.device)
    grid = min(8 * sms(), num_rows // rows * (size // BLOCK))
    _silu_mul_quant_kernel[(grid,)](x, out, scales, route.total, num_rows, size, rows, num_warps=4)
    return Fp8(out, scales)


@triton.jit(do_not_specialize=["num_tokens"])
def _combine_kernel(
    y_ptr, rows_ptr, weights_ptr, out_ptr, num_tokens,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """One token and BLOCK_D columns, its rows summed in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    out = tl.zeros([BLOCK_D], tl.float32)
    for choice in tl.static_range(CHOICES):
        row = tl.load(rows_ptr + token * CHOICES + choice).to(tl.int64)
        y = tl.load(y_ptr + row * D + col, mask=(row >= 0) & (col < D), other=0.0).to(tl.float32)
        if choice < TOP_K:
            y *= tl.load(weights_ptr + token * TOP_K + choice)
        out += tl.where(row >= 0, y, 0.0)
    tl.store(out_ptr + token * D + col, out, mask=col < D)


def combine(y: Tensor, route: ExpertRoute, weights: Tensor, out: Tensor) -> None:
    """y [num_rows, D], weights float32 [T, K] -> out [T, D]; the shared expert's weight is 1."""
    (num, top_k), dim = weights.shape, y.shape[1]
    block_d, num_warps = (512, 1) if num <= 256 else (2048, 4)  # one warp keeps all rows of a token under way at once
    assert weights.is_contiguous() and y.is_contiguous() and out.is_contiguous(), (weights.shape, y.shape)
    block_d = min(block_d, triton.next_power_of_2(dim))
    _combine_kernel[(num, triton.cdiv(dim, block_d))](
        y, route.rows, weights, out, num, dim, block_d, top_k, route.rows.shape[1], num_warps=num_warps
    )
