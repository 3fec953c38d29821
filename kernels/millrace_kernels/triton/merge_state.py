"""One program merges BLOCK_H heads of a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    tokens, heads, value = out_a.shape
    assert out_a.stride(2) == out_b.stride(2) == 1
    out = torch.empty_like(out_a, memory_format=torch.contiguous_format)
    lse = torch.empty_like(lse_a, memory_format=torch.contiguous_format)
    if tokens:
        block = min(32, triton.next_power_of_2(heads))
        _merge[(tokens, triton.cdiv(heads, block))](
            out, lse, out_a, lse_a, out_b, lse_b,
            heads, *out_a.stride()[:2], *lse_a.stride(), *out_b.stride()[:2], *lse_b.stride(),
            V=value, BLOCK_H=block, num_warps=4,
        )  # fmt: skip
    return out, lse


@triton.jit
def _merge(
    out_ptr, lse_ptr, a_ptr, lse_a_ptr, b_ptr, lse_b_ptr,
    heads, a_row, a_head, lse_a_row, lse_a_head, b_row, b_head, lse_b_row, lse_b_head,
    V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    present = head < heads
    lse_a = tl.load(lse_a_ptr + token * lse_a_row + head * lse_a_head, mask=present, other=0.0)
    lse_b = tl.load(lse_b_ptr + token * lse_b_row + head * lse_b_head, mask=present, other=0.0)
    base = tl.maximum(lse_a, lse_b)
    base = tl.where(base == float("-inf"), 0.0, base)  # -inf - -inf is NaN
    share_a, share_b = tl.exp(lse_a - base), tl.exp(lse_b - base)
    total = share_a + share_b
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    lse = tl.where(seen, base + tl.log(total), float("-inf"))
    tl.store(lse_ptr + token * heads + head, lse, mask=present)

    column, mask = tl.arange(0, V)[None, :], present[:, None]
    a = tl.load(a_ptr + token * a_row + head[:, None] * a_head + column, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + token * b_row + head[:, None] * b_head + column, mask=mask, other=0.0).to(tl.float32)
    out = a * (share_a / total)[:, None] + b * (share_b / total)[:, None]
    where = out_ptr + (token * heads + head[:, None]) * V + column
    tl.store(where, out.to(out_ptr.dtype.element_ty), mask=mask)
