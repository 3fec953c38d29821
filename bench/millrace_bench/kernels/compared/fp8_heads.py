"""The products of the absorbed form with FP8 activations, to be compared with those of `mla_absorb` in BF16. They cost
accuracy, so `backend.TABLE` gets them only where they are measured to be faster.

Both multiply heads outside of tokens, so what they give is copied into the op's form, which is one launch more.
"""

import functools
from collections.abc import Callable

import torch
from millrace_kernels.fp8 import Fp8
from millrace_kernels.triton.rope import rotate_into
from torch import Tensor

from millrace_bench.kernels.compared.heads_quant import heads_cast, heads_quant

Product = Callable[[Tensor, Fp8], Tensor]


def grouped(x: Tensor, weight: Fp8) -> Tensor:
    """DeepGEMM's masked GEMM, an expert of it a head; rows are quantised by groups of 128 columns.

    Args:
        x: bfloat16 [T, H, K].
        weight: E4M3 [H, N, K], scales of 128 x 128 blocks [H, N/128, K/128], both contiguous.
    Returns:
        bfloat16 [H, T, N].
    """
    import deep_gemm

    num, rows = x.shape[0], heads_quant(x)
    out = x.new_empty(*rows.data.shape[:2], weight.data.shape[1])
    counts = _counts(x.shape[1], num, x.device)
    if num:
        deep_gemm.fp8_m_grouped_gemm_nt_masked(tuple(rows), tuple(weight), out, counts, num)
    return out[:, :num]


def batched(x: Tensor, weight: Fp8) -> Tensor:
    """FlashInfer's product with one scale of each tensor: 1 for x, `weight.scales` [1] for the weight; otherwise as
    `grouped`.
    """
    from flashinfer.gemm import bmm_fp8

    if not len(x):
        return x.new_empty(x.shape[1], 0, weight.data.shape[1])
    return bmm_fp8(heads_cast(x), weight.data.transpose(1, 2), _one(x.device), weight.scales, torch.bfloat16)


def absorb_q(q: Tensor, w_uk: Fp8, cos: Tensor, sin: Tensor, product: Product) -> Tensor:
    """`mla_absorb.absorb_q` of a w_uk that lies as [H, C, N]."""
    latent, nope = w_uk.data.shape[1:]
    out = q.new_empty(*q.shape[:2], latent + q.shape[2] - nope)
    out[..., :latent] = product(q[..., :nope], w_uk).transpose(0, 1)
    rotate_into(out[..., latent:], q[..., nope:], cos, sin)
    return out


def project_v(latent: Tensor, w_uv: Fp8, product: Product) -> Tensor:
    """`mla_absorb.project_v` of a w_uv [H, V, C]."""
    return product(latent, w_uv).transpose(0, 1).flatten(1)


@functools.cache
def _counts(heads: int, num: int, device: torch.device) -> Tensor:
    return torch.full((heads,), num, dtype=torch.int32, device=device)


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, device=device)
