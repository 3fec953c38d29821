"""Absorbed MLA attention: all heads share one key of 576 (latent 512 | rope 64) whose latent part is also the value.

out_i = sum_j softmax_j(scale * q_i . kv_j) c_kv_j        kv_j = [c_kv_j | k_pe_j]

An E4M3 pool has scale 1: c_kv is normed, so E4M3 holds it as it is. The library's kernel then rounds the query and the
probabilities to E4M3 too: relative error 0.036 against bf16, where the rounding of the pool alone costs less.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.backend import KernelPlan, implementation

PAGES_PER_BLOCK = 32


def most_queries(kv_dtype: torch.dtype) -> int:
    """Queries of a sequence that a call should have at most: with more it is right too, but slower on sm90."""
    return 64 if kv_dtype == torch.float8_e4m3fn else sys.maxsize  # lib/flash_mla.py says why


def plan(seq_lens: Tensor, queries_per_seq: int, num_heads: int, kv_dtype: torch.dtype) -> KernelPlan:
    """The distribution of a step's work over the GPU: made once, used by all layers. Computed on the device, without
    synchronisation, so a CUDA graph may contain it and it follows the `seq_lens` of each replay.

    Args: seq_lens: int32 [B], the ones of the calls to come. queries_per_seq: S; num_heads: H. Returns: The `plan` of
        `mla_decode`; None where an implementation needs none.
    """
    run = implementation("mla_decode.plan", seq_lens.device, seq_lens.shape[0])
    return run(seq_lens, queries_per_seq, num_heads, kv_dtype) if run else None


def mla_decode(
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int,
    plan: KernelPlan = None,
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
    if run := implementation("mla_decode.mla_decode", q.device, q.shape[0]):
        return run(q, kv, page_table, seq_lens, scale, kv_lora_rank, plan)
    return _by_pages(q, kv, page_table, seq_lens, scale, kv_lora_rank)


def _by_pages(
    q: Tensor, kv: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora_rank: int
) -> tuple[Tensor, Tensor]:
    """Attend to each page in use on its own, then merge the pages of a sequence by their log-sum-exp.

    Work is proportional to the pages in use (U), not to batch times the longest sequence, and the pages are read in
    blocks that stay in the cache between the two products.
    """
    num_seqs, num_queries, num_heads, _ = q.shape
    page_size, device = kv.shape[1], q.device
    seq_lens = seq_lens.long()
    num_pages = (seq_lens + page_size - 1) // page_size  # [B]
    used = torch.arange(page_table.shape[1], device=device) < num_pages.unsqueeze(1)  # [B, P]
    seq, page = used.nonzero(as_tuple=True)  # [U]
    physical = page_table[seq, page].long()
    in_page = seq_lens[seq] - page * page_size  # keys of the sequence from this page on; may exceed a page
    queries = (q * scale).flatten(1, 2)  # [B, S*H, C+R]

    page_out = queries.new_empty(len(seq), num_queries * num_heads, kv_lora_rank)
    page_lse = queries.new_empty(page_out.shape[:2], dtype=torch.float32)
    for start in range(0, len(seq), PAGES_PER_BLOCK):
        block = slice(start, start + PAGES_PER_BLOCK)
        rows = pages_of(kv, physical[block]).to(q.dtype)
        page_out[block], page_lse[block] = _attend(queries[seq[block]], rows, in_page[block], num_queries, kv_lora_rank)

    padded = page_lse.new_full((*used.shape, page_lse.shape[1]), -torch.inf)
    padded[used] = page_lse
    lse = padded.logsumexp(1)  # [B, S*H]; -inf where a query saw no key
    weights = (page_lse - lse.masked_fill(lse == -torch.inf, 0.0)[seq]).exp_()
    out = torch.zeros(num_seqs, *page_out.shape[1:], device=device)
    out.index_add_(0, seq, page_out * weights.unsqueeze(-1))
    shape = (num_seqs, num_queries, num_heads)
    return out.to(q.dtype).view(*shape, kv_lora_rank), lse.view(shape)


def pages_of(kv: Tensor, ids: Tensor) -> Tensor:
    """[len(ids), page_size, C+R]"""
    if kv.dtype == torch.float8_e4m3fn:
        return kv.view(torch.uint8)[ids].view(kv.dtype)
    return F.embedding(ids, kv.flatten(1)).view(-1, *kv.shape[1:])  # faster than an index


def _attend(q: Tensor, rows: Tensor, in_page: Tensor, num_queries: int, kv_lora_rank: int) -> tuple[Tensor, Tensor]:
    """q [U, S*H, C+R], rows [U, page_size, C+R] -> out [U, S*H, C], lse [U, S*H] of each page alone."""
    num_heads = q.shape[1] // num_queries
    key = torch.arange(rows.shape[1], device=q.device)
    beyond = (key >= in_page.unsqueeze(1)).flatten().nonzero().squeeze(1)
    rows.view(-1, rows.shape[2]).index_fill_(0, beyond, 0.0)  # may be NaN, and 0 * NaN is NaN
    last_key = in_page.unsqueeze(1) - num_queries + torch.arange(num_queries, device=q.device)  # [U, S], causal
    future = (key > last_key.unsqueeze(-1)).repeat_interleave(num_heads, dim=1)  # [U, S*H, page_size]
    scores = torch.bmm(q, rows.transpose(1, 2)).float().masked_fill_(future, -torch.inf)
    lse = scores.logsumexp(-1)
    probs = scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
    return torch.bmm(probs.to(q.dtype), rows[..., :kv_lora_rank]), lse
