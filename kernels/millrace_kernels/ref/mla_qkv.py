from __future__ import annotations

from torch import Tensor

from millrace_kernels.fp8 import Operand
from millrace_kernels.ref.kv_store import kv_store
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
