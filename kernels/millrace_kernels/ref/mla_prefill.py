from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

QUERY_BLOCK = 128  # bounds the score matrix; causal blocks skip the keys to their right


def plan(
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    num_heads: int,
    qk_head_dim: int,
    v_head_dim: int,
    causal: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    return None


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
