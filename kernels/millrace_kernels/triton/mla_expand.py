"""One program assembles the keys of BLOCK_H heads of a token; v stays where the projection put it."""

import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.triton.rope import rotate_into


def expand_kv(up: Tensor, k_pe: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    tokens, heads, rope = up.shape[0], up.shape[1], k_pe.shape[1]
    block = min(64, triton.next_power_of_2(heads))
    assert up.stride(2) == k_pe.stride(1) == 1
    k = up.new_empty(tokens, heads, nope + rope)
    if tokens:
        _expand_k[(tokens, triton.cdiv(heads, block))](
            k, up, k_pe,
            heads, *up.stride()[:2], k_pe.stride(0),
            N=nope, R=rope, BLOCK_H=block, num_warps=4,
        )  # fmt: skip
    return k, up[..., nope:]


def rope_q(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pe = q[..., -2 * cos.shape[1] :]
    rotate_into(pe, pe, cos, sin)
    return q


@triton.jit
def _expand_k(
    k_ptr, up_ptr, k_pe_ptr,
    heads, up_row, up_head, k_pe_row,
    N: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    present = head < heads
    rows = k_ptr + (token * heads + head) * (N + R)
    column, pe_column = tl.arange(0, N)[None, :], tl.arange(0, R)[None, :]
    nope = tl.load(up_ptr + token * up_row + head * up_head + column, mask=present, other=0.0)
    pe = tl.load(k_pe_ptr + token * k_pe_row + pe_column)
    tl.store(rows + column, nope, mask=present)
    tl.store(rows + N + pe_column, tl.broadcast_to(pe, (BLOCK_H, R)), mask=present)
