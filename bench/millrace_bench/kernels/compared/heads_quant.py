"""Rows of heads in FP8 with heads outside of tokens, as batched products want them: the transposition is part of the
one pass that quantises.
"""

import torch
import triton
import triton.language as tl
from millrace_kernels.fp8 import BLOCK, Fp8
from millrace_kernels.moe_masked import BLOCK_ROWS
from millrace_kernels.triton.e4m3 import saturated
from millrace_kernels.triton.quant import config, quantise
from torch import Tensor


@triton.jit(do_not_specialize=["tokens", "rows"])
def _quant_heads(
    out, scales, x, tokens, rows, x_row, x_head,
    K: tl.constexpr, BLOCK_T: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    head, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, col = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T), group * 128 + tl.arange(0, 128)
    present = token < tokens
    at = x + head * x_head + token[:, None].to(tl.int64) * x_row + col[None, :]
    values = tl.load(at, mask=present[:, None], other=0.0).to(tl.float32)
    to = out + (head * rows + token[:, None]) * K + col[None, :]
    if GROUPED:
        quantised, scale = quantise(values)
        tl.store(to, quantised, mask=present[:, None])
        tl.store(scales + (head * (K // 128) + group) * rows + token, scale, mask=present)
    else:
        tl.store(to, saturated(values).to(tl.float8e4nv), mask=present[:, None])


def heads_quant(x: Tensor) -> Fp8:
    """x bfloat16 [T, H, K], K in blocks -> E4M3 [H, M, K], scales float32 [H, M, K/128] of each row's groups, column by
    column. M is T rounded up to whole blocks of a masked product; rows from T on have any content.
    """
    tokens, heads, width = x.shape
    rows = -(-tokens // BLOCK_ROWS) * BLOCK_ROWS
    out = torch.empty(heads, rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(heads, width // BLOCK, rows, dtype=torch.float32, device=x.device)
    _launch(out, scales, x, grouped=True)
    return Fp8(out, scales.transpose(1, 2))


def heads_cast(x: Tensor) -> Tensor:
    """x bfloat16 [T, H, K], K in blocks -> E4M3 [H, T, K] with scale 1; larger values saturate at 448."""
    out = torch.empty(x.shape[1], x.shape[0], x.shape[2], dtype=torch.float8_e4m3fn, device=x.device)
    _launch(out, out, x, grouped=False)
    return out


def _launch(out: Tensor, scales: Tensor, x: Tensor, grouped: bool) -> None:
    (tokens, heads, width), (block_t, warps) = x.shape, config(x.shape[0])
    assert width % BLOCK == 0 and x.stride(2) == 1, (x.shape, x.stride())
    if tokens:
        _quant_heads[(heads, width // BLOCK, triton.cdiv(tokens, block_t))](
            out, scales, x, tokens, out.shape[1], *x.stride()[:2], width, block_t, grouped, num_warps=warps
        )
