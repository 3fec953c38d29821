"""`torch.bmm` writes through a view of the result: heads lie inside of tokens there, and nothing is copied. The plain
weights are read, never the quantised ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_kernels.fp8 import Fp8, Operand, quant_groups
from millrace_kernels.ref.rope import rope


def absorb_q(q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor, quantised: Fp8 | None = None) -> Tensor:
    nope, latent = w_uk.shape[1:]
    out = q.new_empty(*q.shape[:2], latent + q.shape[2] - nope)
    torch.bmm(q[..., :nope].transpose(0, 1), w_uk, out=out[..., :latent].transpose(0, 1))
    out[..., latent:] = rope(q[..., nope:], cos, sin)
    return out


def project_v(latent: Tensor, w_uv: Tensor) -> Tensor:
    out = latent.new_empty(*latent.shape[:2], w_uv.shape[1])
    torch.bmm(latent.transpose(0, 1), w_uv.transpose(1, 2), out=out.transpose(0, 1))
    return out.flatten(1)


def project_v_quant(latent: Tensor, w_uv: Tensor, quantised: Fp8 | None = None) -> Operand:
    """Two launches on a GPU: the quantisation is that of the table."""
    return Operand(None, quant_groups(project_v(latent, w_uv)))
