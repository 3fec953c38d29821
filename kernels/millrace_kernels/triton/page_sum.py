"""A program sums PART words of one page."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, TURNS = 4096, 8
PART = BLOCK * TURNS


def page_sums(pool: Tensor, pages: Tensor, num_words: int) -> Tensor:
    assert pool.stride(1) == 1, pool.stride()
    parts = triton.cdiv(num_words, PART)
    out = torch.empty(pages.shape[0], parts, dtype=torch.int64, device=pool.device)
    if pages.shape[0]:
        _sum[(parts, pages.shape[0])](
            out, pool, pages, num_words, pool.stride(0), parts, BLOCK=BLOCK, TURNS=TURNS, num_warps=8
        )
    return out.sum(dim=1)


@triton.jit
def _sum(out_ptr, pool_ptr, pages_ptr, num_words, page_words, parts, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1)
    page = pool_ptr + tl.load(pages_ptr + row).to(tl.int64) * page_words
    total = tl.zeros((BLOCK,), tl.int64)
    for turn in range(TURNS):
        word = (part * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(page + word, mask=word < num_words, other=0).to(tl.int64)
        total += value * (2 * word + 1).to(tl.int64)
    tl.store(out_ptr + row * parts + part, tl.sum(total))
