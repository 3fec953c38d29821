"""The two products that let attention run on the cached rows themselves (the absorbed form of MLA).

q_h = [q_nope_h W_UK_h | rope(q_pe_h)]        out_h = latent_h W_UV_h^T

`quantised` is the same weight as an FP8 checkpoint stores it, where a head is one row of its blocks: E4M3 of the same
shape, scales float32 [H, C/128], any head strides. Implementations that were measured to be faster with it read it
instead. The references read the plain weight; their `torch.bmm` writes through a view of the result, in which heads lie
inside of tokens, so nothing is copied.
"""

import torch
from torch import Tensor

from millrace_kernels.backend import SMALL_TOKENS, implementation
from millrace_kernels.fp8 import Fp8, Operand, quant_groups
from millrace_kernels.rope import rope


def absorb_q(q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor, quantised: Fp8 | None = None) -> Tensor:
    """The query of `mla_decode`.

    Args:
        q: [T, H, N+R], before its rotation.
        w_uk: [H, N, C], any head stride.
        cos, sin: float32 [T, R/2].
    Returns:
        [T, H, C+R], contiguous.
    """
    assert q.shape[1] == w_uk.shape[0] and q.shape[2] == w_uk.shape[1] + 2 * cos.shape[1], (q.shape, w_uk.shape)
    if run := implementation("mla_absorb.absorb_q", q.device, q.shape[0], _shape(w_uk, quantised)):
        return run(q, w_uk, cos, sin, quantised)
    nope, latent = w_uk.shape[1:]
    out = q.new_empty(*q.shape[:2], latent + q.shape[2] - nope)
    torch.bmm(q[..., :nope].transpose(0, 1), w_uk, out=out[..., :latent].transpose(0, 1))
    out[..., latent:] = rope(q[..., nope:], cos, sin)
    return out


def project_v(latent: Tensor, w_uv: Tensor) -> Tensor:
    """latent [T, H, C], w_uv [H, V, C] (any head stride) -> [T, H * V], contiguous."""
    assert latent.shape[1] == w_uv.shape[0] and latent.shape[2] == w_uv.shape[2], (latent.shape, w_uv.shape)
    out = latent.new_empty(*latent.shape[:2], w_uv.shape[1])
    torch.bmm(latent.transpose(0, 1), w_uv.transpose(1, 2), out=out.transpose(0, 1))
    return out.flatten(1)


def project_v_quant(latent: Tensor, w_uv: Tensor, quantised: Fp8 | None = None) -> Operand:
    """project_v for an FP8 product: plain up to SMALL_TOKENS tokens, above quantised only."""
    if latent.shape[0] <= SMALL_TOKENS:
        return Operand(project_v(latent, w_uv), None)
    if run := implementation("mla_absorb.project_v_quant", latent.device, latent.shape[0], _shape(w_uv, quantised)):
        return run(latent, w_uv, quantised)
    return Operand(None, quant_groups(project_v(latent, w_uv)))  # on a GPU two launches, each of the table


def _shape(weight: Tensor, quantised: Fp8 | None) -> tuple[int, ...]:
    """The weight's, and the bytes of an element in its smallest form; FP8 is one beside BF16 only."""
    assert quantised is None or quantised.data.shape == weight.shape, (quantised, weight.shape)
    return (*weight.shape, 1 if quantised is not None and weight.dtype == torch.bfloat16 else weight.itemsize)
