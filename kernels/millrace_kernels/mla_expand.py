"""Projections to operands of `mla_prefill` (the expanded form of MLA).

k_h = [up_nope_h | k_pe]        v_h = up_v_h        q_h = [q_nope_h | rope(q_pe_h)]
"""

from __future__ import annotations

from torch import Tensor

from millrace_kernels.backend import implementation


def expand_kv(up: Tensor, k_pe: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """Keys and values of every head.

    Args:
        up: [T, H, N+V]; its first `nope` = N columns belong to the key.
        k_pe: [T, R], rotated; all heads share it.
    Returns:
        k [T, H, N+R], contiguous, and v [T, H, V], a view of `up`.
    """
    assert up.shape[0] == k_pe.shape[0] and 0 < nope < up.shape[2], (up.shape, k_pe.shape, nope)
    return implementation("mla_expand.expand_kv", up.device)(up, k_pe, nope)


def rope_q(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the last R columns of q [T, H, N+R] in place; cos, sin float32 [T, R/2]. Returns q."""
    assert q.shape[0] == cos.shape[0] and q.shape[2] > 2 * cos.shape[1], (q.shape, cos.shape)
    return implementation("mla_expand.rope_q", q.device)(q, cos, sin)
