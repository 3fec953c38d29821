"""Expanded MLA attention (heads of 192 for q and k, 128 for v) over ragged sequences.

out_i = sum_j softmax_j(scale * q_i . k_j) v_j        lse_i = log sum_j exp(scale * q_i . k_j)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from millrace_kernels.backend import implementation


def plan(
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    num_heads: int,
    qk_head_dim: int,
    v_head_dim: int,
    causal: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """The distribution of a step's work over the GPU: made on the host once, used by all layers. A step may hold
    several.

    Returns: The `plan` of `mla_prefill`; None where an implementation needs none.
    """
    op = implementation("mla_prefill.plan", device, sum(q_lens))
    return op(q_lens, k_lens, num_heads, qk_head_dim, v_head_dim, causal, device, dtype)


def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    scale: float,
    causal: bool,
    plan: Any = None,
) -> tuple[Tensor, Tensor]:
    """Sequence b owns the next q_lens[b] rows of q and the next k_lens[b] rows of k and v.

    Args:
        q: [Tq, H, Dq]; k: [Tk, H, Dq]; v: [Tk, H, Dv]; the last dimension of each is contiguous. Rows past the sum of
            the lengths are not read.
        causal: query i of a sequence sees keys j <= i; needs q_lens == k_lens. Otherwise every query sees every key.
        plan: of these lengths, heads and causal; None: the call makes its own.
    Returns:
        out [Tq, H, Dv] in q's dtype and lse float32 [Tq, H]. A query without keys has out 0 and lse -inf, and so do the
        rows past the sum of the lengths.
    """
    assert sum(q_lens) <= q.shape[0] and sum(k_lens) <= k.shape[0] == v.shape[0], (q.shape, k.shape, v.shape)
    assert not causal or tuple(q_lens) == tuple(k_lens), (q_lens, k_lens)
    op = implementation("mla_prefill.mla_prefill", q.device, sum(q_lens))
    return op(q, k, v, q_lens, k_lens, scale, causal, plan)
