"""Absorbed MLA attention: all heads share one key of 576 (latent 512 | rope 64) whose latent part is also the value.

out_i = sum_j softmax_j(scale * q_i . kv_j) c_kv_j        kv_j = [c_kv_j | k_pe_j]

An E4M3 pool has scale 1: c_kv is normed, so E4M3 holds it as it is. The library's kernel then rounds the query and the
probabilities to E4M3 too: relative error 0.036 against bf16, where the rounding of the pool alone costs less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from millrace_kernels.backend import implementation


def plan(seq_lens: Tensor, queries_per_seq: int, num_heads: int, kv_dtype: torch.dtype) -> Any:
    """The distribution of a step's work over the GPU: made once, used by all layers. Computed on the device, without
    synchronisation, so a CUDA graph may contain it and it follows the `seq_lens` of each replay.

    Args: seq_lens: int32 [B], the ones of the calls to come. queries_per_seq: S; num_heads: H. Returns: The `plan` of
        `mla_decode`; None where an implementation needs none.
    """
    op = implementation("mla_decode.plan", seq_lens.device, seq_lens.shape[0])
    return op(seq_lens, queries_per_seq, num_heads, kv_dtype)


def mla_decode(
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int,
    plan: Any = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last S tokens of each sequence over its pages.

    Args:
        q: [B, S, H, C+R], query s of sequence b is token seq_lens[b] - S + s; tokens before 0 are padding.
        kv: [num_pages, page_size, C+R], one layer of the pool; pages may lie apart, a page is contiguous.
        page_table: int32 [B, P], P >= 1; the first entry names a page even of a sequence without keys, entries past a
            sequence's last page are not read.
        seq_lens: int32 [B], keys of each sequence, the S queries included; 0 for a padding sequence.
        kv_lora_rank: C.
        plan: of these seq_lens, S, H and kv's dtype; None: the call makes its own.
    Returns:
        out [B, S, H, C] in q's dtype, and lse float32 [B, S, H]. Padding queries have out 0, except that over an E4M3
        pool the queries of a sequence of length 0 may have anything; their lse is infinite, of either sign.
    Notes:
        Rows of the last page past seq_lens may hold anything, NaN included.
    """
    assert q.shape[-1] == kv.shape[-1] and q.shape[0] == page_table.shape[0] == seq_lens.shape[0]
    op = implementation("mla_decode.mla_decode", q.device, q.shape[0])
    return op(q, kv, page_table, seq_lens, scale, kv_lora_rank, plan)
