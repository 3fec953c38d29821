"""One launch, some rows per program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256  # choices of a program


def expert_slots(ids: Tensor, table: Tensor) -> Tensor:
    assert ids.is_contiguous() and table.is_contiguous() and ids.dtype == table.dtype == torch.int32
    (turns, columns), count = table.shape, ids.numel()
    out = torch.empty_like(ids)
    if count:
        _slots[(triton.cdiv(count, BLOCK),)](out, ids, table, count, ids.shape[1], turns, columns, BLOCK, num_warps=4)
    return out


@triton.jit(do_not_specialize=["count"])
def _slots(out, ids, table, count, K: tl.constexpr, TURNS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    expert = tl.load(ids + at, inside, other=-1)
    column = tl.where(expert < 0, COLUMNS - 1, expert)
    tl.store(out + at, tl.load(table + (at // K) % TURNS * COLUMNS + column, inside), inside)
