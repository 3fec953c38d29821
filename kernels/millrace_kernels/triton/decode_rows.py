"""A program per sequence: its rows, and a copy of its line of the page table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.decode_rows import DecodeRows, SlotState


def decode_rows(
    slots: Tensor, state: SlotState, page_table: Tensor, page_size: int, num_queries: int, column: int, ahead: int
) -> DecodeRows:
    lengths, capacity, last_tokens = state
    assert last_tokens.stride(1) == page_table.stride(1) == 1 and slots.is_contiguous()
    (num,), num_pages = slots.shape, page_table.shape[1]
    # one allocation each: a part of another tensor may lie at 8 bytes, for which readers would be compiled again
    token_ids, positions, kv_slots = (slots.new_empty(num * num_queries) for _ in range(3))
    seq_lens = torch.empty(num, dtype=torch.int32, device=slots.device)
    table = page_table.new_empty(num, num_pages)
    if num:
        _decode_rows[(num,)](
            token_ids, positions, kv_slots, seq_lens, table, slots, lengths, capacity, last_tokens, page_table,
            last_tokens.stride(0), page_table.stride(0), num_pages, column, ahead,
            PAGE=page_size, Q=num_queries, Q_PAD=triton.next_power_of_2(num_queries), BLOCK=256, num_warps=2,
        )  # fmt: skip
    return DecodeRows(token_ids, positions, kv_slots, seq_lens, table)


@triton.jit(do_not_specialize=["num_pages", "column", "ahead"])  # a request would wait for the compiler
def _decode_rows(
    token_ids, positions, kv_slots, seq_lens, table, slots, lengths, capacity, last_tokens, page_table,
    tokens_row, table_row, num_pages, column, ahead,
    PAGE: tl.constexpr, Q: tl.constexpr, Q_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    seq, row = tl.program_id(0).to(tl.int64), tl.arange(0, Q_PAD)
    slot = tl.load(slots + seq)
    page_table += slot * table_row
    start = tl.load(lengths + slot) + ahead
    position = start + row
    tokens = tl.load(last_tokens + slot * tokens_row + column + row, row < Q, other=0)
    page = tl.load(page_table + tl.minimum(position // PAGE, num_pages - 1), row < Q, other=0)
    kv_slot = tl.where(position < tl.load(capacity + slot), page.to(tl.int64) * PAGE + position % PAGE, 0)
    tl.store(token_ids + seq * Q + row, tl.maximum(tokens, 0), row < Q)
    tl.store(positions + seq * Q + row, position, row < Q)
    tl.store(kv_slots + seq * Q + row, kv_slot, row < Q)
    tl.store(seq_lens + seq, tl.minimum(start + Q, num_pages * PAGE))
    for first in range(0, num_pages, BLOCK):
        at = first + tl.arange(0, BLOCK)
        pages = tl.load(page_table + at, at < num_pages, other=0)
        tl.store(table + seq * num_pages + at, pages, at < num_pages)
