"""Projections to operands of `mla_prefill` (the expanded form of MLA).

k_h = [up_nope_h | k_pe]        v_h = up_v_h        q_h = [q_nope_h | rope(q_pe_h)]
"""

import torch
from torch import Tensor

from millrace_kernels.backend import implementation
from millrace_kernels.rope import rope


def expand_kv(up: Tensor, k_pe: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """Keys and values of every head.

    Args:
        up: [T, H, N+V]; its first `nope` = N columns belong to the key.
        k_pe: [T, R], rotated; all heads share it.
    Returns:
        k [T, H, N+R], contiguous, and v [T, H, V], a view of `up`.
    """
    assert up.shape[0] == k_pe.shape[0] and 0 < nope < up.shape[2], (up.shape, k_pe.shape, nope)
    if run := implementation("mla_expand.expand_kv", up.device):
        return run(up, k_pe, nope)
    k_pe = k_pe.unsqueeze(1).expand(-1, up.shape[1], -1)
    return torch.cat((up[..., :nope], k_pe), dim=-1), up[..., nope:]


def rope_q(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the last R columns of q [T, H, N+R] in place; cos, sin float32 [T, R/2]. Returns q."""
    assert q.shape[0] == cos.shape[0] and q.shape[2] > 2 * cos.shape[1], (q.shape, cos.shape)
    if run := implementation("mla_expand.rope_q", q.device):
        return run(q, cos, sin)
    pe = q[..., -2 * cos.shape[1] :]
    pe.copy_(rope(pe, cos, sin))
    return q
