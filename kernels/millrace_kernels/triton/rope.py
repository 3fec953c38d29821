"""RoPE of the last columns of every head: one program rotates BLOCK_H heads of a token."""

import triton
import triton.language as tl
from torch import Tensor

FEW = 32, 8  # heads of a program, at most, and of a warp; in place each element belongs to one thread
MANY = 128, 16  # from MANY_TOKENS on: 150 us for 16,384 tokens of 128 heads, not 165
MANY_TOKENS = 1024


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """out, x [T, H, R] of any strides but the last, which is 1; out may be x."""
    tokens, heads, width = x.shape
    block, per_warp = FEW if tokens < MANY_TOKENS else MANY
    assert x.stride(2) == out.stride(2) == cos.stride(1) == sin.stride(1) == 1 and cos.stride(0) == sin.stride(0)
    if not tokens:
        return
    block = max(per_warp, min(block, triton.next_power_of_2(heads)))
    _rotate[(tokens, triton.cdiv(heads, block))](
        out, x, cos, sin,
        heads, *out.stride()[:2], *x.stride()[:2], cos.stride(0),
        HALF=width // 2, BLOCK_H=block, num_warps=block // per_warp,
    )  # fmt: skip


@triton.jit
def rotate(x, cos, sin):
    """x [M, R] in FP32, cos and sin [M or 1, R/2]. Neighbouring columns stay in one lane."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), x.shape)


@triton.jit
def _rotate(
    out_ptr, x_ptr, cos_ptr, sin_ptr,
    heads, out_row, out_head, x_row, x_head, angle_row,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    column, angle = tl.arange(0, 2 * HALF)[None, :], token * angle_row + tl.arange(0, HALF)[None, :]
    present = head < heads
    cos, sin = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)
    x = tl.load(x_ptr + token * x_row + head * x_head + column, mask=present, other=0.0)
    rotated = rotate(x.to(tl.float32), cos, sin).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_row + head * out_head + column, rotated, mask=present)
