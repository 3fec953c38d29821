"""Inputs of sparse attention's ops as keyword arguments; memory that must not be read is NaN."""

from collections.abc import Sequence

import torch
from millrace_kernels import indexer
from millrace_kernels.indexer import IndexRows, cached_rows
from millrace_kernels.testing.attention_inputs import LATENT, PAGE, ROW, SCALE, Draw, Inputs
from torch import Tensor

HEADS, WIDTH, LAYERS, CANARY = 64, 128, 3, 64  # V3.2's heads and columns; bytes at a page's end
PAGE_ROWS = LAYERS * PAGE + 25  # index keys take what is behind the latent rows


def index_queries(draw: Draw, num: int, heads: int, exact: bool = False) -> Inputs:
    weights = draw(num, heads, dtype=torch.float32)
    return {"x": draw(num, heads, WIDTH), "weights": weights, **draw.angles(num), "exact": exact}


def index_store(draw: Draw, num: int, exact: bool = False) -> Inputs:
    """The pool holds one page more than the tokens need."""
    pages = num // PAGE + 2
    slots = draw.permutation((pages - 1) * PAGE)[:num] + PAGE
    return {"cache": _cache(draw, pages, exact), "slots": slots, **_key(draw, num)}


def index_logits(draw: Draw, lens: Sequence[int], per_row: bool, exact: bool = False, heads: int = HEADS) -> Inputs:
    """Tokens with so many keys each: of a sequence each, or all of the longest one's."""
    table = _page_table(draw, lens if per_row else [max(lens)])
    cache = _cache(draw, int(table.max()) + 1, exact)
    slots = _slots(table, lens if per_row else [max(lens)])
    indexer.index_store(cache, slots, **_key(draw, len(slots)))
    q, weights = indexer.index_queries(**index_queries(draw, len(lens), heads, exact))
    return {
        "q": q,
        "weights": weights,
        "cache": cache,
        "page_table": table,
        "lens": torch.tensor(lens, dtype=torch.int32, device=draw.device),
    }


def chosen_rows(draw: Draw, lens: Sequence[int], topk: int, per_row: bool) -> Inputs:
    table = _page_table(draw, lens if per_row else [max(lens)])
    logits = draw(len(lens), table.shape[1] * PAGE, dtype=torch.float32)
    lengths = torch.tensor(lens, dtype=torch.int32, device=draw.device)
    call = {"logits": indexer.masked(logits, lengths), "lens": lengths, "topk": topk, "page_table": table}
    return {**call, "page_size": PAGE, "page_rows": PAGE_ROWS}


def first_of_equals(logits: Tensor, lens: Tensor, topk: int) -> Tensor:
    """int32 [T, topk], the keys with the largest logits in their order, of equal ones the first; -1 behind the last."""
    keys = indexer.masked(logits.clone(), lens).sort(descending=True, stable=True).indices[:, :topk].sort().values
    return keys.masked_fill_(keys >= lens.unsqueeze(1), -1).int()


def mla_sparse(draw: Draw, lens: Sequence[int], topk: int, heads: int, kv_dtype: torch.dtype) -> Inputs:
    """Tokens of a sequence each, which attend to `topk` of so many keys, or to all of fewer."""
    table, item = _page_table(draw, lens), torch.empty(0, dtype=kv_dtype).itemsize
    pages = int(table.max()) + 1
    pool = torch.full((pages, PAGE_ROWS * ROW * item), 0xFF, dtype=torch.uint8, device=draw.device).view(kv_dtype)
    kv = pool[:, PAGE * ROW : 2 * PAGE * ROW].unflatten(1, (PAGE, ROW))
    chosen = torch.full((len(lens), topk), -1, dtype=torch.int32, device=draw.device)
    for row, num in enumerate(lens):
        slots = _slots(table[row : row + 1], [num])[draw.permutation(num)[:topk]]
        chosen[row, : len(slots)] = slots // PAGE * PAGE_ROWS + slots % PAGE
        raw = kv.view(torch.uint8) if item == 1 else kv
        raw[slots // PAGE, slots % PAGE] = draw(len(slots), ROW).to(kv_dtype).view(raw.dtype)
    pool.view(torch.uint8)[0] = 0  # the null page
    call = {"q": draw(len(lens), heads, ROW), "kv": kv, "chosen": chosen, "lens": (chosen >= 0).sum(1).int()}
    return {**call, "scale": SCALE, "kv_lora_rank": LATENT}


def _cache(draw: Draw, pages: int, exact: bool) -> IndexRows:
    """The second layer's index keys in pages that are NaN."""
    layer = PAGE * (4 * WIDTH if exact else WIDTH + 4)
    pool = torch.full((pages, LAYERS * layer + CANARY), 0xFF, dtype=torch.uint8, device=draw.device)
    return cached_rows(pool, layer, PAGE, WIDTH, exact)


def _key(draw: Draw, num: int) -> Inputs:
    norm = draw(WIDTH, dtype=torch.float32), draw(WIDTH, dtype=torch.float32)
    return {"k": draw(num, WIDTH), "norm": norm, **draw.angles(num)}


def _page_table(draw: Draw, lens: Sequence[int]) -> Tensor:
    """int32 [B, P] of shuffled pages; 0 behind a sequence's last one."""
    counts = torch.tensor([-(-num // PAGE) for num in lens])
    used = torch.arange(int(counts.max())) < counts.unsqueeze(1)
    table = torch.zeros(used.shape, dtype=torch.int32)
    table[used] = (draw.permutation(int(counts.sum())) + 1).int().cpu()
    return table.to(draw.device)


def _slots(table: Tensor, lens: Sequence[int]) -> Tensor:
    """int64: those of all tokens of the sequences, back to back."""
    keys = [torch.arange(num, device=table.device) for num in lens]
    return torch.cat([row[key // PAGE].long() * PAGE + key % PAGE for row, key in zip(table, keys, strict=True)])
