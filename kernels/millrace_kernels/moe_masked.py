"""out[e, r] = w2_e silu_mul(w13_e x[e, r]) for the first counts[e] rows of each expert e, which lie together.

An exchange that sorts rows by expert leaves them like this: every expert has room for the most rows that may come, and
only the device knows how many came.
"""

import torch
from torch import Tensor

from millrace_kernels.backend import implementation
from millrace_kernels.fp8 import Fp8, Operand
from millrace_kernels.int8 import Matrix
from millrace_kernels.moe_experts import one_expert, plain_rows

BLOCK_ROWS = 128  # a product writes whole blocks of an expert, over the next expert's rows if its room ends before


def moe_masked(x: Fp8, counts: Tensor, w13: Matrix, w2: Matrix, expected: int) -> Tensor:
    """The experts of this rank applied to rows that are sorted by expert.

    Args:
        x: E4M3 [E, M, D], scales float32 [E, M, D/128]; on CUDA the scales of an expert lie column by column, and M is
            a multiple of BLOCK_ROWS. Rows from counts[e] on have any content.
        counts: int32 [E], at most M each.
        w13: [E, 2I, D], gate rows then up rows; w2: [E, D, I]; both FP8, with scales of 128 x 128 blocks.
        expected: rows of an expert; it changes only the speed.
    Returns:
        bfloat16 [E, M, D]; rows from counts[e] on have any content.
    """
    assert isinstance(w13, Fp8) and isinstance(w2, Fp8), "plain weights have no such products"
    (held, _, dim), width = x.data.shape, w13.data.shape[1]
    assert w13.data.shape == (held, width, dim) and w2.data.shape == (held, dim, width // 2), w2.data.shape
    assert counts.shape == (held,) and counts.dtype == torch.int32, (counts.shape, counts.dtype)
    if run := implementation("moe_masked.moe_masked", counts.device):
        return run(x, counts, w13, w2, expected)
    out = torch.empty(x.data.shape, dtype=torch.bfloat16, device=counts.device)
    for expert, count in enumerate(counts.tolist()):
        rows = plain_rows(Operand(None, Fp8(x.data[expert, :count], x.scales[expert, :count])))
        out[expert, :count] = one_expert(rows, w13, w2, expert)
    return out
