"""Two programs a token, which need nothing of each other: one norms and quantises q, the other makes the cached row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import BLOCK, Operand
from millrace_kernels.triton.e4m3 import saturated
from millrace_kernels.triton.quant import empty_fp8, quantise
from millrace_kernels.triton.rope import rotate


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
    tokens, latent, rope = qkv.shape[0], kv_weight.shape[0], 2 * cos.shape[1]
    width = qkv.shape[1] - latent - rope
    assert qkv.stride(1) == kv.stride(2) == cos.stride(1) == sin.stride(1) == 1 and cos.stride(0) == sin.stride(0)
    c_kv, k_pe = qkv.new_empty(tokens, latent), qkv.new_empty(tokens, rope)
    q: Tensor | None = qkv[:, :width]
    fp8 = empty_fp8(tokens, width, qkv.device) if q_weight is not None and tokens > SMALL_TOKENS else None
    if q_weight is not None:
        q = qkv.new_empty(tokens, width) if plain or fp8 is None or qkv.dtype != torch.bfloat16 else None
    if tokens:
        q16, (q8, scales) = qkv if q is None else q, fp8 or (qkv, qkv)  # not touched where there is none
        _norm_store[(tokens, 1 if q_weight is None else 2)](
            qkv, kv_weight if q_weight is None else q_weight, kv_weight, cos, sin, slots,
            q16, q8, scales, c_kv, k_pe, kv,
            qkv.stride(0), cos.stride(0), scales.stride(1), kv.stride(0), kv.stride(1), eps,
            Q=width, C=latent, HALF=rope // 2, GROUPS=triton.next_power_of_2(triton.cdiv(width, BLOCK)),
            PAGE=kv.shape[1], PLAIN=q is not None, QUANT=fp8 is not None, num_warps=4,
        )  # fmt: skip
    return Operand(q, fp8), c_kv, k_pe


@triton.jit(do_not_specialize=["scale_column"])
def _norm_store(
    qkv_ptr, q_weight_ptr, kv_weight_ptr, cos_ptr, sin_ptr, slots_ptr,
    q_ptr, q8_ptr, scales_ptr, c_kv_ptr, k_pe_ptr, kv_ptr,
    qkv_row, angle_row, scale_column, kv_page, kv_row, eps,
    Q: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr,
    PLAIN: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    x_ptr = qkv_ptr + token * qkv_row
    if tl.program_id(1) == 1:
        q_ptr, q8_ptr = q_ptr + token * Q, q8_ptr + token * Q
        scales_ptr += token
        _norm_q(x_ptr, q_weight_ptr, q_ptr, q8_ptr, scales_ptr, scale_column, eps, Q, GROUPS, PLAIN, QUANT)
    else:
        column, pe_column = tl.arange(0, C), tl.arange(0, 2 * HALF)[None, :]
        weight = tl.load(kv_weight_ptr + column).to(tl.float32)
        x = tl.load(x_ptr + Q + column).to(tl.float32)
        pe = tl.load(x_ptr + Q + C + pe_column).to(tl.float32)
        slot, angles = tl.load(slots_ptr + token), token * angle_row + tl.arange(0, HALF)[None, :]
        rotated = rotate(pe, tl.load(cos_ptr + angles), tl.load(sin_ptr + angles)).to(k_pe_ptr.dtype.element_ty)
        normed = (x * tl.rsqrt(tl.sum(x * x, axis=0) / C + eps) * weight).to(c_kv_ptr.dtype.element_ty)
        tl.store(c_kv_ptr + token * C + column, normed)
        tl.store(k_pe_ptr + token * 2 * HALF + pe_column, rotated)
        cached = kv_ptr + slot // PAGE * kv_page + slot % PAGE * kv_row
        tl.store(cached + column, _as_cached(normed, kv_ptr))
        tl.store(cached + C + pe_column, _as_cached(rotated, kv_ptr))


@triton.jit(do_not_specialize=["scale_column"])
def _norm_q(
    x_ptr, weight_ptr, q_ptr, q8_ptr, scales_ptr,
    scale_column, eps,
    Q: tl.constexpr, GROUPS: tl.constexpr, PLAIN: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """A row as a tile [groups, 128]: a group's largest is one reduction."""
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = column < Q
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + column, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(x * x, axis=1), axis=0) / Q
    normed = (x * tl.rsqrt(mean + eps) * weight).to(q_ptr.dtype.element_ty)
    if PLAIN:
        tl.store(q_ptr + column, normed, mask=mask)
    if QUANT:
        quantised, scale = quantise(normed.to(tl.float32))
        tl.store(q8_ptr + column, quantised, mask=mask)
        tl.store(scales_ptr + group.to(tl.int64) * scale_column, scale, mask=group * 128 < Q)


@triton.jit
def _as_cached(x, kv_ptr):
    """Cast to the pool's dtype; E4M3 saturates."""
    if kv_ptr.dtype.element_ty == tl.float8e4nv:
        x = saturated(x)
    return x.to(kv_ptr.dtype.element_ty)
