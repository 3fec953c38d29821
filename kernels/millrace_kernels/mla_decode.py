"""Absorbed MLA attention: all heads share one key of 576 (latent 512 | rope 64) whose latent part is also the value.

out_i = sum_j softmax_j(scale * q_i . kv_j) c_kv_j        kv_j = [c_kv_j | k_pe_j]
"""

from __future__ import annotations

from torch import Tensor

from millrace_kernels.backend import implementation


def mla_decode(
    q: Tensor, kv: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora_rank: int
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last S tokens of each sequence over its pages.

    Args:
        q: [B, S, H, C+R], query s of sequence b is token seq_lens[b] - S + s; tokens before 0 are padding.
        kv: [num_pages, page_size, C+R], one layer of the pool; pages may lie apart, a page is contiguous.
        page_table: int32 [B, P]; entries past a sequence's last page are not read.
        seq_lens: int32 [B], keys of each sequence, the S queries included; 0 for a padding sequence.
        kv_lora_rank: C.
    Returns:
        out [B, S, H, C] in q's dtype and lse float32 [B, S, H]; padding queries have out 0 and lse -inf.
    Notes:
        Rows of the last page past seq_lens may hold anything, NaN included.
    """
    assert q.shape[-1] == kv.shape[-1] and q.shape[0] == page_table.shape[0] == seq_lens.shape[0]
    return implementation("mla_decode.mla_decode", q.device)(q, kv, page_table, seq_lens, scale, kv_lora_rank)
