"""FP8 experts through DeepGEMM's masked GEMMs: w13 -> SwiGLU and quantise -> w2, on rows that are sorted by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_kernels.fp8 import Fp8
from millrace_kernels.moe_masked import BLOCK_ROWS
from millrace_kernels.triton.moe_masked import silu_mul_quant


def moe_masked(x: Fp8, counts: Tensor, w13: Fp8, w2: Fp8, expected: int) -> Tensor:
    return _product(silu_mul_quant(_product(x, counts, w13, expected), counts), counts, w2, expected)


def _product(x: Fp8, counts: Tensor, weight: Fp8, expected: int) -> Tensor:
    import deep_gemm

    held, most, _ = x.data.shape
    assert most % BLOCK_ROWS == 0, most
    out = torch.empty(held, most, weight.data.shape[1], dtype=torch.bfloat16, device=counts.device)
    deep_gemm.fp8_m_grouped_gemm_nt_masked(tuple(x), tuple(weight), out, counts, min(expected, most))
    return out
