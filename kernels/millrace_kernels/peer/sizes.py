"""Bytes of peer memory. Nothing here needs Triton: memory is planned on any machine."""

import torch

from millrace_kernels.fp8 import BLOCK


def row_bytes(dim: int, choices: int, dtype: torch.dtype) -> int:
    """Of one row of any rank in the buffers of `Exchange`: it and its result, scales, slots and weights."""
    return 2 * dim * dtype.itemsize + 4 * -(-dim // BLOCK) + 8 * choices
