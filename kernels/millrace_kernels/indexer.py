"""The lightning indexer of sparse attention (DeepSeek-V3.2 paper, eq. 1): which cached tokens a token attends to.

I_ts = sum_j w_tj relu(q_tj . k_s)        a token t attends to the top-k tokens s <= t by I_ts

Keys are cached beside the latent rows: float32 as they are, for exact results, or E4M3 with one scale per row. What
becomes E4M3 is first multiplied by a Hadamard matrix, which leaves products alone and spreads outliers over the row.

Letters: T tokens, H index heads, I index_head_dim, R rope dim, P pages of the longest sequence.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.backend import KernelPlan, implementation
from millrace_kernels.fp8 import quant_groups

E4M3 = torch.float8_e4m3fn
EPS = 1e-6  # of the keys' norm
PLAN_STEP = 32
BLOCK_BYTES = 1 << 26  # of float32 keys that the reference holds at a time


class IndexRows(NamedTuple):
    """Those of a cache are [num_pages, page_size, I] with scales of [num_pages, page_size]; pages may lie apart."""

    data: Tensor  # E4M3 or float32 [..., I]
    scales: Tensor | None  # float32 [...]; None: of float32 data


def page_bytes(kv: Tensor) -> Tensor:
    """uint8 [num_pages, page_bytes], of a view [num_pages, ...] that begins where the pages begin."""
    return kv.as_strided((len(kv), kv.stride(0)), (kv.stride(0), 1)).view(torch.uint8)


def cached_rows(pages: Tensor, first: int, page_size: int, width: int, exact: bool) -> IndexRows:
    """The index keys of a layer: in each page the data of all tokens, behind it their scales.

    Args: pages: uint8 [num_pages, page_bytes], may be strided. first: where they begin in a page, a multiple of 4.
        exact: they are float32.
    """
    if exact:
        rows = pages[:, first : first + 4 * page_size * width]
        return IndexRows(rows.view(torch.float32).unflatten(1, (page_size, width)), None)
    end = first + page_size * width
    data = pages[:, first:end].view(E4M3).unflatten(1, (page_size, width))
    return IndexRows(data, pages[:, end : end + 4 * page_size].view(torch.float32))


def index_queries(x: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, *, exact: bool) -> tuple[Tensor, Tensor]:
    """Rotates queries and quantises what is not `exact`; their scales become part of the weights, because they are
    positive: w relu(s q . k) = (w s) relu(q . k).

    Args: x: [T, H, I], contiguous. weights: float32 [T, H]. cos, sin: float32 [T, R/2].
    Returns: [T, H, I], E4M3 or float32, and weights [T, H].
    """
    assert x.shape[:2] == weights.shape and x.is_contiguous(), (x.shape, weights.shape)
    if not exact and (run := implementation("indexer.index_queries", x.device, x.shape[0])):
        return run(x, weights, cos, sin)
    data, scales = rotated_rows(x, cos, sin, exact)
    return data, weights if scales is None else weights * scales


def rotated_rows(x: Tensor, cos: Tensor, sin: Tensor, exact: bool) -> IndexRows:
    """x [T, H, I], of whose first R columns x[i] and x[i + R/2] are a pair -> [T, H, I]."""
    half, cos, sin = cos.shape[1], cos.unsqueeze(1), sin.unsqueeze(1)
    low, high, rest = x.float().split((half, half, x.shape[2] - 2 * half), dim=-1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)
    if exact:
        return IndexRows(rotated, None)
    data, scales = quant_groups(rotated.flatten(0, 1) @ hadamard(x.shape[2], x.device))
    return IndexRows(data.view(x.shape), scales.reshape(x.shape[:2]))


@functools.cache
def hadamard(width: int, device: torch.device) -> Tensor:
    """float32 [width, width], symmetric and orthogonal; width is a power of 2."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * width**-0.5


def index_store(
    cache: IndexRows, slots: Tensor, k: Tensor, norm: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor
) -> None:
    """cache[slot // page_size, slot % page_size] = rotated_rows(layer_norm(k)), in place; the norm's eps is 1e-6.

    Args: slots: int64 [T]; of tokens that share one, which only the null page has, any is stored. k: [T, I],
        contiguous. norm: weight and bias, float32 [I]. cos, sin: float32 [T, R/2].
    """
    assert k.shape == (slots.shape[0], cache.data.shape[2]) and k.is_contiguous(), (k.shape, cache.data.shape)
    exact, page_size = cache.scales is None, cache.data.shape[1]
    if not exact and (run := implementation("indexer.index_store", k.device, k.shape[0])):
        run(cache, slots, k, norm, cos, sin)
        return
    normed = F.layer_norm(k.float(), k.shape[1:], *norm, EPS)
    keys, at = rotated_rows(normed.unsqueeze(1), cos, sin, exact), (slots // page_size, slots % page_size)
    cache.data.view(torch.uint8)[at] = keys.data[:, 0].view(torch.uint8)  # an E4M3 tensor takes no index
    if cache.scales is not None and keys.scales is not None:
        cache.scales[at] = keys.scales[:, 0]


def plan(lens: Tensor, per_row: bool) -> KernelPlan:
    """The distribution of `index_logits` over the GPU, for all layers of a step; computed on the device, so a CUDA
    graph may contain it. None where an implementation needs none. per_row: the page table has a row per token.
    """
    run = implementation("indexer.plan", lens.device, lens.shape[0]) if per_row else None
    return run(lens) if run else None


def compile_ahead(max_tokens: int, device: torch.device) -> None:
    """Compile the kernels of `plan` for 1 to max_tokens tokens: DeepGEMM has one for every 32."""
    for tokens in range(1, max_tokens + 1, PLAN_STEP):
        plan(torch.ones(tokens, dtype=torch.int32, device=device), per_row=True)


def index_logits(
    q: Tensor, weights: Tensor, cache: IndexRows, page_table: Tensor, lens: Tensor, plan: KernelPlan = None
) -> Tensor:
    """I of each token and of each key of its sequence.

    Args:
        q, weights: [T, H, I] and [T, H], as `index_queries` makes them.
        cache: of a layer; rows at or behind a token's length may hold anything, NaN included.
        page_table: int32 [T, P], or [1, P] for tokens of one sequence.
        lens: int32 [T], keys of each token, itself included; 1 to P * page_size.
        plan: of these `lens`.
    Returns:
        float32 [T, P * page_size], -inf at and behind `lens`.
    """
    assert q.dtype == cache.data.dtype and weights.shape == q.shape[:2], (q.dtype, weights.shape)
    assert page_table.shape[0] in (1, lens.shape[0]) and lens.shape[0] == weights.shape[0], page_table.shape
    if run := implementation("indexer.index_logits", q.device, lens.shape[0]):
        return run(q, weights, cache, page_table, lens, plan)
    return reference_logits(q, weights, cache, page_table, lens)


def reference_logits(q: Tensor, weights: Tensor, cache: IndexRows, page_table: Tensor, lens: Tensor) -> Tensor:
    num_keys, width = page_table.shape[1] * cache.data.shape[1], cache.data.shape[2]
    queries, out = q.float(), weights.new_empty(len(lens), num_keys)
    block = len(lens) if len(page_table) == 1 else max(BLOCK_BYTES // (4 * width * num_keys), 1)
    for start in range(0, len(lens), block):
        rows = slice(start, start + block)
        data, scales = gathered(cache, page_table[rows if len(page_table) > 1 else slice(1)])
        keys = data if scales is None else data.float() * scales.unsqueeze(-1)  # [B or 1, K, I]
        products = torch.matmul(queries[rows], keys.transpose(1, 2)).relu_()  # [B, H, K]
        out[rows] = torch.matmul(weights[rows].unsqueeze(1), products).squeeze(1)
    return masked(out, lens)


def gathered(cache: IndexRows, page_table: Tensor) -> IndexRows:
    """The keys of sequences back to back: page_table int32 [B, P] -> [B, P * page_size, I]"""
    pages = page_table.long()
    data = cache.data.view(torch.uint8)[pages].view(cache.data.dtype).flatten(1, 2)
    return IndexRows(data, None if cache.scales is None else cache.scales[pages].flatten(1, 2))


def masked(logits: Tensor, lens: Tensor) -> Tensor:
    """float32 [T, K] in place: -inf at and behind `lens` int32 [T]."""
    if run := implementation("indexer.masked", logits.device, logits.shape[0]):
        return run(logits, lens)
    return logits.masked_fill_(torch.arange(logits.shape[1], device=logits.device) >= lens.unsqueeze(1), -torch.inf)


def chosen_rows(logits: Tensor, lens: Tensor, topk: int, page_table: Tensor, page_size: int, page_rows: int) -> Tensor:
    """int32 [T, topk]: the pool's rows (page * page_rows + offset) of the keys with the largest logits, in any order;
    -1 behind them where there are fewer keys. Of equal logits any may be chosen, but the same on every rank.

    Args: logits, lens: as `index_logits` has them. page_table: int32 [T or 1, P]. page_rows: from a page's first row to
        that of the next.
    """
    keys = top_keys(logits, lens, topk)
    if run := implementation("indexer.chosen_rows", logits.device, logits.shape[0]):
        return run(keys, lens, topk, page_table, page_size, page_rows)
    first, lens = torch.arange(keys.shape[1], device=keys.device), lens.unsqueeze(1)
    keys = torch.where(lens <= topk, first, keys)
    pages = page_table.expand(len(keys), -1).gather(1, keys // page_size)
    rows = (pages * page_rows + keys % page_size).int().masked_fill_(first >= lens, -1)
    return F.pad(rows, (0, topk - rows.shape[1]), value=-1)


def top_keys(logits: Tensor, lens: Tensor, topk: int) -> Tensor:
    """int32 or int64 [T, min(topk, keys)], in any order; anything for a token that has no more than `topk` keys."""
    if run := implementation("indexer.top_keys", logits.device, logits.shape[0], logits.shape):
        return run(logits, lens, topk)
    return logits.topk(min(topk, logits.shape[1]), sorted=False).indices
