"""Expanded MLA attention (heads of 192 for q and k, 128 for v) over ragged sequences.

out_i = sum_j softmax_j(scale * q_i . k_j) v_j        lse_i = log sum_j exp(scale * q_i . k_j)
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from millrace_kernels.backend import KernelPlan, implementation

QUERY_BLOCK = 128  # bounds the score matrix; causal blocks skip the keys to their right


class Heads(NamedTuple):
    """One rank's heads: how many, widths of q and k, and of v."""

    num_heads: int
    qk_dim: int
    v_dim: int


def plan(
    q_lens: Sequence[int], k_lens: Sequence[int], heads: Heads, causal: bool, device: torch.device, dtype: torch.dtype
) -> KernelPlan:
    """The distribution of a step's work over the GPU: made on the host once, used by all layers. A step may hold
    several.

    Returns: The `plan` of `mla_prefill`; None where an implementation needs none.
    """
    run = implementation("mla_prefill.plan", device, sum(q_lens))
    return run(q_lens, k_lens, heads, causal, device, dtype) if run else None


def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    scale: float,
    causal: bool,
    plan: KernelPlan = None,
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
    if run := implementation("mla_prefill.mla_prefill", q.device, sum(q_lens)):
        return run(q, k, v, q_lens, k_lens, scale, causal, plan)
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    q_start = k_start = 0
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        keys = k[k_start : k_start + k_len].permute(1, 2, 0)  # [H, Dq, Tk]
        values = v[k_start : k_start + k_len].transpose(0, 1)  # [H, Tk, Dv]
        for first in range(0, q_len if k_len else 0, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, q_len)
            seen = last if causal else k_len
            rows = slice(q_start + first, q_start + last)
            block = q[rows].transpose(0, 1) * scale
            out_b, lse_b = _attend(block, keys[..., :seen], values[:, :seen], first if causal else None)
            out[rows], lse[rows] = out_b.transpose(0, 1), lse_b.transpose(0, 1)
        q_start += q_len
        k_start += k_len
    return out, lse


def _attend(q: Tensor, keys: Tensor, values: Tensor, causal_from: int | None) -> tuple[Tensor, Tensor]:
    """q [H, S, Dq] whose first row is query `causal_from` of its sequence; -> [H, S, Dv], [H, S]."""
    scores = torch.bmm(q, keys).float()  # [H, S, Tk]
    if causal_from is not None:
        num_rows = q.shape[1]
        future = torch.ones(num_rows, num_rows, dtype=torch.bool, device=q.device).triu(1)
        scores[..., causal_from:].masked_fill_(future, -torch.inf)
    lse = scores.logsumexp(dim=-1)  # [H, S]
    probs = scores.sub_(lse.unsqueeze(-1)).exp_()
    return torch.bmm(probs.to(values.dtype), values), lse
