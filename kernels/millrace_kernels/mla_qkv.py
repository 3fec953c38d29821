"""The operations after the projection of a step's tokens to [q | c_kv | k_pe], in one pass.

q = rms_norm(q) q_weight        c_kv = rms_norm(c_kv) kv_weight        k_pe = rope(k_pe)
kv[slot // page_size, slot % page_size] = [c_kv | k_pe]
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.backend import implementation
from millrace_kernels.fp8 import E4M3_MAX, Operand
from millrace_kernels.rms_norm import reference_norm
from millrace_kernels.rope import rope


def mla_qkv_norm(
    qkv: Tensor,
    q_weight: Tensor | None,
    kv_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    kv: Tensor,
    *,
    plain: bool = True,
) -> tuple[Operand, Tensor, Tensor]:
    """Norms, rotation and the write into the pool.

    Args:
        qkv: [T, Q+C+R], rows may be strided.
        q_weight: [Q]; None passes q through as it is, a model without q_lora_rank has no such norm.
        kv_weight: [C].
        cos, sin: float32 [T, R/2].
        slots: int64 [T]; several tokens may share a slot of the null page, which then holds any one of them.
        kv: [num_pages, page_size, C+R], any page stride; bf16, float32, or E4M3 with scale 1, saturated at 448.
        plain: False leaves q's plain form out, as in `rms_norm`.
    Returns:
        q [T, Q]: plain, and in FP8 above SMALL_TOKENS tokens, never when passed through; c_kv [T, C] and k_pe [T, R],
        not rounded to the pool's dtype.
    """
    latent, rope_width = kv_weight.shape[0], 2 * cos.shape[1]
    assert kv.shape[-1] == latent + rope_width and qkv.shape[0] == cos.shape[0] == slots.shape[0], (qkv.shape, kv.shape)
    assert q_weight is None or qkv.shape[1] == q_weight.shape[0] + latent + rope_width, (qkv.shape, q_weight.shape)
    if run := implementation("mla_qkv.mla_qkv_norm", qkv.device, qkv.shape[0]):
        return run(qkv, q_weight, kv_weight, eps, cos, sin, slots, kv, plain)
    q, c_kv, k_pe = qkv.split((qkv.shape[1] - latent - rope_width, latent, rope_width), dim=-1)
    operand = Operand(q, None)
    if q_weight is not None:
        operand = reference_norm(q, q_weight, eps, True, plain)
    c_kv, k_pe = F.rms_norm(c_kv, kv_weight.shape, kv_weight, eps), rope(k_pe, cos, sin)
    kv_store(kv, slots, c_kv, k_pe)
    return operand, c_kv, k_pe


def kv_store(kv: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
    """kv[slot // page_size, slot % page_size] = [c_kv | k_pe], in place; E4M3 saturates. Of several tokens that share
    a slot, which only the null page has, any one is stored.
    """
    page_size = kv.shape[1]
    rows = torch.cat((c_kv, k_pe), dim=-1)
    if kv.dtype == torch.float8_e4m3fn:
        rows = rows.clamp(-E4M3_MAX, E4M3_MAX).to(kv.dtype).view(torch.uint8)  # beyond it the conversion makes NaN
        kv = kv.view(torch.uint8)
    kv[slots // page_size, slots % page_size] = rows.to(kv.dtype)
