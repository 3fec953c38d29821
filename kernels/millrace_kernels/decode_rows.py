"""The rows of decode sequences, made of what the device keeps of each slot.

    row i of a sequence    token last_tokens[slot, column + i] at position p = lengths[slot] + ahead + i
    place of its KV        page_table[slot, p // page_size] * page_size + p % page_size

A row at or behind `capacity` has no page: its KV goes to the null page, place 0. Letters: N slots, K tokens of each, B
sequences, q rows of each, P pages of the longest.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from millrace_kernels.backend import implementation


class SlotState(NamedTuple):
    """What the device keeps of each slot."""

    lengths: Tensor  # int64 [N], tokens whose KV is in the pages
    capacity: Tensor  # int64 [N], positions that have a page
    last_tokens: Tensor  # int64 [N, K], the newest token, which has no KV yet, and drafts; -1: no draft


class DecodeRows(NamedTuple):
    token_ids: Tensor  # int64 [B * q]
    positions: Tensor  # int64 [B * q]
    kv_slots: Tensor  # int64 [B * q]
    seq_lens: Tensor  # int32 [B], keys of each sequence, those of its rows included; at most those of P pages
    page_table: Tensor  # int32 [B, P]


def decode_rows(
    slots: Tensor,
    state: SlotState,
    page_table: Tensor,
    page_size: int,
    num_queries: int,
    column: int = 0,
    ahead: int = 0,
) -> DecodeRows:
    """
    Args:
        slots: int64 [B]; page_table: int32 [N, P], P >= 1. A page behind the last column is that of the last column.
        num_queries: q <= K - column. A token -1 is read as 0.
    """
    lengths, capacity, last_tokens = state
    assert column + num_queries <= last_tokens.shape[1], (column, num_queries, last_tokens.shape)
    if run := implementation("decode_rows.decode_rows", slots.device, slots.shape[0]):
        return run(slots, state, page_table, page_size, num_queries, column, ahead)
    places = torch.arange(num_queries, device=slots.device)
    positions = lengths[slots, None] + ahead + places
    table = page_table.index_select(0, slots)
    page = table.gather(1, (positions // page_size).clamp_(max=table.shape[1] - 1)).long()
    kv_slots = (page * page_size + positions % page_size).masked_fill_(positions >= capacity[slots, None], 0)
    return DecodeRows(
        token_ids=last_tokens[slots, column : column + num_queries].clamp_(min=0).flatten(),
        positions=positions.flatten(),
        kv_slots=kv_slots.flatten(),
        seq_lens=(lengths[slots] + ahead + num_queries).clamp_(max=table.shape[1] * page_size).int(),
        page_table=table,
    )
