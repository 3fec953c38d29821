from __future__ import annotations

import torch
from torch import Tensor

from millrace_kernels.fp8 import E4M3_MAX, Operand
from millrace_kernels.ref.rms_norm import rms_norm, rms_norm_quant
from millrace_kernels.ref.rope import rope


def mla_qkv_norm(
    qkv: Tensor,
    q_weight: Tensor | None,
    kv_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    kv: Tensor,
    plain: bool = True,
) -> tuple[Operand, Tensor, Tensor]:
    latent = kv_weight.shape[0]
    q, c_kv, k_pe = qkv.split((qkv.shape[1] - kv.shape[-1], latent, kv.shape[-1] - latent), dim=-1)
    operand = Operand(q, None) if q_weight is None else rms_norm_quant(q, q_weight, eps, plain)
    c_kv, k_pe = rms_norm(c_kv, kv_weight, eps), rope(k_pe, cos, sin)
    kv_store(kv, slots, c_kv, k_pe)
    return operand, c_kv, k_pe


def kv_store(kv: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
    """kv[slot // page_size, slot % page_size] = [c_kv | k_pe], in place; E4M3 saturates. Of several tokens that share
    a slot, which only the sink page has, any one is stored.
    """
    page_size = kv.shape[1]
    rows = torch.cat((c_kv, k_pe), dim=-1)
    if kv.dtype == torch.float8_e4m3fn:
        rows = rows.clamp(-E4M3_MAX, E4M3_MAX).to(kv.dtype).view(torch.uint8)  # beyond it the conversion makes NaN
        kv = kv.view(torch.uint8)
    kv[slots // page_size, slots % page_size] = rows.to(kv.dtype)
