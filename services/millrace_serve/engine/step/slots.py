"""The device's state of each slot, and the rows of a step made of it.

The host has bounds of a sequence's length, the device the exact length. So a step can be launched before the previous
one was read, however many tokens that one accepts.

    row i of a decode sequence   token last_tokens[slot, i] at position lengths[slot] + i
    row i of a chunk             token i of the chunk at position lengths[slot] + i

The row's KV goes to the page of its position. A row at or behind `capacity` has no page: its KV goes to the sink, and
nothing that comes of it is accepted. The last slot is padding: its length and its capacity are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.step.batch import SlotUpdates, StepBatch
from millrace_serve.model.inputs import AttnPlan, ForwardInput


class Slots:
    """Only the thread that launches steps uses it."""

    def __init__(self, config: EngineConfig, device: torch.device, max_queries: int = 1) -> None:
        count = config.max_running + 1

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.padding = count - 1
        self.page_size = config.page_size
        self.lengths = zeros(count)  # tokens whose KV is in the pages
        self.capacity = zeros(count)  # positions that may be written
        self.num_prompt = zeros(count)
        self.last_tokens = zeros(count, max_queries)  # the newest token, which has no KV yet, and drafts
        self.page_table = torch.zeros(count, config.max_pages_per_seq, dtype=torch.int32, device=device)
        self._ones = torch.ones(count, dtype=torch.int64, device=device)

    @property
    def max_pages(self) -> int:
        return self.page_table.shape[1]

    def update(self, updates: SlotUpdates[Tensor]) -> None:
        self.page_table.index_put_((updates.page_slots, updates.page_indexes), updates.pages)
        self.capacity.index_copy_(0, updates.grown, updates.capacity)
        if updates.joined.shape[0]:
            self.lengths.index_copy_(0, updates.joined, updates.lengths)
            self.num_prompt.index_copy_(0, updates.joined, updates.num_prompt)
            self.last_tokens[:, 0].index_copy_(0, updates.joined, updates.last_tokens)

    def inputs(self, step: StepBatch[Tensor], rows: Rows | None = None) -> ForwardInput:
        """Without prompt chunks nothing here depends on the host, so a graph may hold it.

        Args:
            rows: decode_rows of a step without prompt chunks, where they exist already
        """
        num_decode, q = step.num_decode, step.num_queries
        token_ids = self.last_tokens[step.slots[:num_decode], :q].flatten()
        lens: Tensor | int = q
        if not step.is_decode:
            lens = step.cu_q[1:] - step.cu_q[:-1]
            seq_of_row = torch.repeat_interleave(lens, output_size=step.num_tokens)
            rows = seq_of_row, torch.arange(step.num_tokens, device=token_ids.device) - step.cu_q[seq_of_row]
            token_ids = torch.cat((token_ids, step.chunk_tokens))
        seq_of_row, offsets = rows or decode_rows(num_decode, q, token_ids.device)
        starts = self.lengths[step.slots]
        page_table = self.page_table[:, : step.num_pages].index_select(0, step.slots)
        positions = starts[seq_of_row] + offsets
        page = page_table[seq_of_row, (positions // self.page_size).clamp_(max=step.num_pages - 1)]
        kv_slots = page.long() * self.page_size + positions % self.page_size
        kv_slots.masked_fill_(positions >= self.capacity[step.slots][seq_of_row], 0)
        attn = AttnPlan(
            num_decode=num_decode,
            cu_q=step.cu_q,
            seq_lens=(starts + lens).int(),
            page_table=page_table,
            q_lens_host=(q,) * num_decode + step.chunk_lens,
            seq_lens_host=(0,) * num_decode + step.chunk_ends,
        )
        return ForwardInput(
            token_ids=token_ids,
            positions=positions,
            kv_slots=kv_slots,
            attn=attn,
            sample_rows=step.sample_rows,
            dp_num_tokens=step.dp_num_tokens,
            num_tokens=step.num_rows,
        )

    def output_index(self, positions: Tensor, step: StepBatch[Tensor]) -> Tensor:
        """int64 [S]: which output of its request each sampled row gives. `positions` of the sampled rows."""
        return positions + 1 - self.num_prompt[step.sample_slots]

    def advance(self, step: StepBatch[Tensor], tokens: Tensor | None) -> None:
        """Take the step's results over.

        Args:
            tokens: int64 [S], one sampled token of each sampling sequence; None: no sequence samples
        """
        num_decode = step.num_decode
        if num_decode:
            self.lengths.index_add_(0, step.slots[:num_decode], self._ones[:num_decode])
        if not step.is_decode:
            lens = (step.cu_q[1:] - step.cu_q[:-1]).long()
            self.lengths.index_add_(0, step.slots[num_decode:], lens[num_decode:])
        if tokens is not None:
            self.last_tokens[:, 0].index_copy_(0, step.sample_slots, tokens)


Rows = tuple[Tensor, Tensor]  # int64 [T] twice: the row's sequence, and its place among the sequence's rows


def decode_rows(count: int, num_queries: int, device: torch.device) -> Rows:
    """The rows of `count` sequences with equally many rows."""
    seqs, places = torch.arange(count, device=device), torch.arange(num_queries, device=device)
    return seqs.repeat_interleave(num_queries), places.repeat(count)
