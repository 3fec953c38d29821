"""A program per token and 1024 columns."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def embed_part(token_ids: Tensor, weight: Tensor, first: int) -> Tensor:
    assert token_ids.is_contiguous() and weight.stride(1) == 1
    held, width = weight.shape
    out = weight.new_empty(token_ids.shape[0], width)
    if out.numel():
        _embed_part[(token_ids.shape[0], triton.cdiv(width, BLOCK))](
            out, token_ids, weight, weight.stride(0), first, held, width, BLOCK=BLOCK, num_warps=4
        )
    return out


@triton.jit
def _embed_part(out, token_ids, weight, weight_row, first, held, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    local = tl.load(token_ids + token) - first
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(weight + local * weight_row + at, inside & (local >= 0) & (local < held), other=0.0)
    tl.store(out + token * width + at, values, inside)
