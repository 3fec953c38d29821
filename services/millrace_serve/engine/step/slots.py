"""The device's state of each slot, and the rows of a step made of it.

The host has bounds of a sequence's length, the device the exact length. So a step can be launched before the previous
one was read, however many tokens that one accepts.

    row i of a decode sequence   token last_tokens[slot, i] at position lengths[slot] + i
    row i of a chunk             token i of the chunk at position lengths[slot] + i

The row's KV goes to the page of its position. A row at or behind `capacity` has no page: it writes to the null page and
reads there, and nothing that comes of it is accepted. The host drops tokens behind the end of a sequence. The last slot
is padding: its length and its capacity are 0.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from millrace_kernels.accept_drafts import NONE, accept_drafts
from millrace_kernels.decode_rows import DecodeRows, SlotState, decode_rows
from torch import Tensor

from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.step.batch import SlotUpdates, StepBatch
from millrace_serve.model.inputs import AttnPlan, ForwardInput


@dataclass(frozen=True, slots=True)
class Accepted:
    """What became of a step's rows, for each sampling sequence."""

    counts: Tensor  # int64 [S], tokens that the step adds; 0 of padding
    drafted: Tensor  # int64 [S], drafts that were verified
    rows: Tensor  # int64 [S], the row of the step whose sample is the newest token


class Slots:
    """Only the thread that launches steps uses it."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        count = config.max_running + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.padding = count - 1
        self.page_size = config.page_size
        self._state = SlotState(zeros(count), zeros(count), zeros(count, config.most_queries))
        self.lengths, self.capacity, self.last_tokens = self._state
        self.num_prompt = zeros(count)
        self.temperature = zeros(count, dtype=torch.float32)
        self.seeds = zeros(count)
        self.page_table = zeros(count, config.table_width, dtype=torch.int32)
        self._accepted = zeros(3, count)

    def update(self, updates: SlotUpdates[Tensor]) -> None:
        self.page_table.index_put_((updates.page_slots, updates.page_indexes), updates.pages)
        self.capacity.index_copy_(0, updates.grown, updates.capacity)
        if updates.joined.shape[0]:
            for state, values in (
                (self.lengths, updates.lengths),
                (self.num_prompt, updates.num_prompt),
                (self.last_tokens, updates.last_tokens),
                (self.temperature, updates.temperature),
                (self.seeds, updates.seeds),
            ):
                state.index_copy_(0, updates.joined, values)

    def inputs(self, step: StepBatch[Tensor]) -> ForwardInput:
        """Without prompt chunks nothing here depends on the host, so a graph may hold it."""
        num_decode, q = step.num_decode, step.num_queries
        rows = self.rows(step.slots, step.num_pages, q) if step.is_decode else self._mixed_rows(step)
        q_lens, seq_lens = (q,) * num_decode + step.chunk_lens, (0,) * num_decode + step.chunk_ends
        attn = AttnPlan(num_decode, rows.seq_lens, rows.page_table, q_lens, seq_lens)
        where = rows.token_ids, rows.positions, rows.kv_slots
        return ForwardInput(*where, attn, step.sample_rows, step.dp_num_tokens, num_tokens=step.num_rows)

    def rows(self, slots: Tensor, num_pages: int, num_queries: int, column: int = 0, ahead: int = 0) -> DecodeRows:
        """As `decode_rows`, with page tables of so many pages."""
        table = self.page_table[:, :num_pages]
        return decode_rows(slots, self._state, table, self.page_size, num_queries, column, ahead)

    def _mixed_rows(self, step: StepBatch[Tensor]) -> DecodeRows:
        """Those of decode sequences, and behind them those of prompt chunks."""
        lens = step.cu_q[1:] - step.cu_q[:-1]
        seq_of_row = torch.repeat_interleave(lens, output_size=step.num_tokens)
        offsets = torch.arange(step.num_tokens, device=lens.device) - step.cu_q[seq_of_row]
        starts, last = self.lengths[step.slots], self.last_tokens[step.slots[: step.num_decode], : step.num_queries]
        positions = starts[seq_of_row] + offsets
        table = self.page_table[:, : step.num_pages].index_select(0, step.slots)
        page = table[seq_of_row, (positions // self.page_size).clamp_(max=table.shape[1] - 1)].long()
        kv_slots = page * self.page_size + positions % self.page_size
        kv_slots.masked_fill_(positions >= self.capacity[step.slots][seq_of_row], 0)
        token_ids = torch.cat((last.flatten().clamp_(min=0), step.chunk_tokens))
        return DecodeRows(token_ids, positions, kv_slots, (starts + lens).int(), table)

    def output_index(self, positions: Tensor, step: StepBatch[Tensor]) -> Tensor:
        """int64 [R]: which output of its request each sampled row gives. `positions` of the sampled rows."""
        return positions + 1 - self.num_prompt[self._row_slots(step)]

    def tokens_before(self, step: StepBatch[Tensor]) -> Tensor:
        """int64 [R, k]: tokens of the sequence's rows up to each sampled row, which takes them for outputs; else -1."""
        q = step.num_queries
        tokens = self.last_tokens[self._row_slots(step), 1:q]
        if q == 1:
            return tokens
        places = torch.arange(tokens.shape[0], device=tokens.device) % q
        places[step.num_decode * q :] = 0
        return tokens.masked_fill(torch.arange(q - 1, device=tokens.device) >= places[:, None], NONE)

    def _row_slots(self, step: StepBatch[Tensor]) -> Tensor:
        """int64 [R]"""
        slots, num_decode = step.sample_slots, step.num_decode
        if step.num_queries == 1:
            return slots
        return torch.cat((slots[:num_decode].repeat_interleave(step.num_queries), slots[num_decode:]))

    def accept(self, step: StepBatch[Tensor], tokens: Tensor, simulated: Tensor | None = None) -> Accepted:
        """Take the step's results over: `tokens` int64 [R], what the rows sampled. Drafts are gone afterwards.

        Args:
            simulated: float32 [K], instead of comparing: the probability that the first draft, the first two, … hold
        Returns:
            Views of memory that the next call writes again.
        """
        num_decode, slots, rows = step.num_decode, step.sample_slots, step.num_decode * step.num_queries
        out = self._accepted[:, : slots.shape[0]]
        accept_drafts(slots[:num_decode], tokens[:rows], self._state, out[:, :num_decode], simulated)
        if not step.is_decode:
            self._take_chunks(step, tokens[rows:], out[:, num_decode:])
        return self.accepted(slots.shape[0])

    def accepted(self, count: int) -> Accepted:
        """The first `count` sequences of the last `accept`."""
        return Accepted(*self._accepted[:, :count])

    def _take_chunks(self, step: StepBatch[Tensor], tokens: Tensor, out: Tensor) -> None:
        """tokens int64 [S - D], out int64 [3, S - D], the columns of those chunks that sample."""
        num_decode, lens = step.num_decode, (step.cu_q[1:] - step.cu_q[:-1]).long()
        self.lengths.index_add_(0, step.slots[num_decode:], lens[num_decode:])
        newest = F.pad(tokens[:, None], (0, self.last_tokens.shape[1] - 1), value=NONE)
        self.last_tokens.index_copy_(0, step.sample_slots[num_decode:], newest)
        out[0], out[1], out[2] = 1, 0, step.sample_rows[num_decode * step.num_queries :]


def by_sequence(values: Tensor, step: StepBatch[Tensor]) -> Tensor:
    """[R, ...] -> [S, q, ...]: the rows of each sampling sequence; those that a chunk does not have are 0."""
    num_decode, q = step.num_decode, step.num_queries
    decode, chunks = values[: num_decode * q].unflatten(0, (num_decode, q)), values[num_decode * q :, None]
    if step.is_decode:
        return decode
    return torch.cat((decode, torch.cat((chunks, chunks.new_zeros(len(chunks), q - 1, *values.shape[1:])), 1)))


def accepted_rows(step: StepBatch[Tensor], accepted: Accepted) -> Tensor:
    """bool [R]: whether the row's sample is one of the tokens that the step adds."""
    num_decode, counts = step.num_decode, accepted.counts
    places = torch.arange(step.num_queries, device=counts.device)
    return torch.cat(((places < counts[:num_decode, None]).flatten(), counts[num_decode:] > 0))
