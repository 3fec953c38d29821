"""DeepGEMM (sgl-deep-gemm) for dense FP8 products on sm90.

It compiles a kernel per tile configuration at its first use, 2 to 5 s each, and keeps it in a folder. The tile depends
on M only through ceil(M / 64), so one call per multiple of 64 (`compile_ahead`) meets every configuration of a shape.
"""

import functools

import torch
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, Fp8
from millrace_kernels.triton import fp8_linear as ours

M_STEP = 64
_met: dict[tuple[int, int], None] = {}  # (N, K) of the products of this process


def fp8_linear(x: Fp8, weight: Fp8, dtype: torch.dtype) -> Tensor:
    """BF16 results of shapes that TMA can address; our kernel computes the others."""
    import deep_gemm

    (num_tokens, k), n = x.data.shape, weight.data.shape[0]
    if dtype != torch.bfloat16 or n % 8 or k % BLOCK:
        return ours.fp8_linear(x, weight, dtype)
    out = torch.empty(num_tokens, n, dtype=dtype, device=x.data.device)
    _met[n, k] = None
    if num_tokens:
        deep_gemm.fp8_gemm_nt((x.data, x.scales), (weight.data, weight.scales), out)
    return out


def sizes(max_tokens: int) -> list[int]:
    """The M that between them meet every tile configuration up to max_tokens."""
    return [16, 32, *range(M_STEP, max_tokens + M_STEP, M_STEP)]


def compile_ahead(max_tokens: int, device: torch.device, start: float = 0.0) -> int:
    products = [(num_tokens, n, k) for n, k in sorted(_met) for num_tokens in sizes(max_tokens)]
    first = int(len(products) * start)
    zeros = functools.partial(torch.zeros, device=device)
    for num_tokens, n, k in products[first:] + products[:first]:
        blocks_n, blocks_k = -(-n // BLOCK), -(-k // BLOCK)
        weight = Fp8(zeros(n, k, dtype=torch.float8_e4m3fn), zeros(blocks_n, blocks_k))
        x = Fp8(zeros(num_tokens, k, dtype=torch.float8_e4m3fn), zeros(blocks_k, num_tokens).t())
        fp8_linear(x, weight, torch.bfloat16)
    return len(_met)
