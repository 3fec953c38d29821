"""The device's state of each slot, and the rows of a step made of it.

The host has bounds of a sequence's length, the device the exact length. So a step can be launched before the previous
one was read, however many tokens that one accepts.

    row i of a decode sequence   token last_tokens[slot, i] at position lengths[slot] + i
    row i of a chunk             token i of the chunk at position lengths[slot] + i

The row's KV goes to the page of its position. A row at or behind `capacity` has no page: its KV goes to the sink, and
nothing that comes of it is accepted. The host drops tokens behind the end of a sequence. The last slot is padding: its
length and its capacity are 0.

Drafts are accepted by equality: the target samples every row as it would without drafts, and draft i is accepted when
it and all drafts before it are what the rows before theirs sampled. So a wrong or a missing draft costs a row, never a
token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from millrace_kernels.sample_tokens import mix32
from torch import Tensor

from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.step.batch import SlotUpdates, StepBatch
from millrace_serve.model.inputs import AttnPlan, ForwardInput

NONE = -1  # the place of a draft without one


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
        self.lengths = zeros(count)  # tokens whose KV is in the pages
        self.capacity = zeros(count)  # positions that have a page
        self.num_prompt = zeros(count)
        self.last_tokens = zeros(count, 1 + config.draft_tokens)  # the newest token, which has no KV yet, and drafts
        self.temperature = zeros(count, dtype=torch.float32)
        self.seeds = zeros(count)
        longest = config.max_model_len + config.draft_tokens  # rows of drafts may lie behind the end of a sequence
        self.page_table = zeros(count, -(-longest // config.page_size), dtype=torch.int32)
        self._ones = torch.ones(count, dtype=torch.int64, device=device)
        self._cu_ones = torch.arange(count + 1, dtype=torch.int32, device=device)

    @property
    def max_pages(self) -> int:
        return self.page_table.shape[1]

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

    def inputs(self, step: StepBatch[Tensor], rows: Rows | None = None) -> ForwardInput:
        """Without prompt chunks nothing here depends on the host, so a graph may hold it.

        Args:
            rows: decode_rows of a step without prompt chunks, where they exist already
        """
        num_decode, q = step.num_decode, step.num_queries
        token_ids = self.last_tokens[step.slots[:num_decode], :q].flatten()
        if q > 1:
            token_ids = token_ids.clamp_(min=0)
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
            kv_slots=self._kv_slots(positions, page_table, seq_of_row, self.capacity[step.slots]),
            attn=attn,
            sample_rows=step.sample_rows,
            dp_num_tokens=step.dp_num_tokens,
            num_tokens=step.num_rows,
        )

    def draft_inputs(self, step: StepBatch[Tensor], draft: int) -> ForwardInput:
        """After `accept`: the row of each sampling sequence whose token is its draft number `draft`, from 1 on."""
        slots, count = step.sample_slots, step.sample_slots.shape[0]
        page_table = self.page_table[:, : step.num_pages].index_select(0, slots)
        positions, each = self.lengths[slots] + (draft - 1), self._cu_ones[:count]
        return ForwardInput(
            token_ids=self.last_tokens[slots, draft],
            positions=positions,
            kv_slots=self._kv_slots(positions, page_table, each, self.capacity[slots]),
            attn=AttnPlan(
                num_decode=count,
                cu_q=self._cu_ones[: count + 1],
                seq_lens=(positions + 1).int(),
                page_table=page_table,
                q_lens_host=(1,) * count,
                seq_lens_host=(0,) * count,
            ),
            sample_rows=step.sample_rows[:0],
            dp_num_tokens=step.dp_num_sampled,
            num_tokens=step.num_rows // step.num_queries if step.is_decode else None,
        )

    def _kv_slots(self, positions: Tensor, page_table: Tensor, seq_of_row: Tensor, capacity: Tensor) -> Tensor:
        """int64 [T] of positions [T]; `page_table` [B, P] and `capacity` [B] of the step's sequences."""
        page = page_table[seq_of_row, (positions // self.page_size).clamp_(max=page_table.shape[1] - 1)]
        kv_slots = page.long() * self.page_size + positions % self.page_size
        return kv_slots.masked_fill_(positions >= capacity[seq_of_row], 0)

    def output_index(self, positions: Tensor, step: StepBatch[Tensor]) -> Tensor:
        """int64 [R]: which output of its request each sampled row gives. `positions` of the sampled rows."""
        return positions + 1 - self.num_prompt[self._row_slots(step)]

    def drafts_before(self, step: StepBatch[Tensor]) -> Tensor:
        """int64 [R, k]: the drafts that each sampled row takes for outputs, -1 elsewhere."""
        q = step.num_queries
        drafts = self.last_tokens[self._row_slots(step), 1:q]
        if q == 1:
            return drafts
        places = torch.arange(drafts.shape[0], device=drafts.device) % q
        places[step.num_decode * q :] = 0
        return drafts.masked_fill(torch.arange(q - 1, device=drafts.device) >= places[:, None], NONE)

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
        """
        num_decode, slots, rows = step.num_decode, step.sample_slots, step.sample_rows
        counts = self._ones[: slots.shape[0]]
        drafted = counts - 1
        if self.last_tokens.shape[1] > 1:  # also where this step has no drafts: a graph's padding gets no token
            counts, drafted = self._verify(step, tokens, simulated)
            last = _last_accepted(step, counts)
            tokens, rows = tokens[last], rows[last]
        self.lengths.index_add_(0, slots[:num_decode], counts[:num_decode])
        if not step.is_decode:
            lens = (step.cu_q[1:] - step.cu_q[:-1]).long()
            self.lengths.index_add_(0, step.slots[num_decode:], lens[num_decode:])
        self.last_tokens.index_copy_(0, slots, F.pad(tokens[:, None], (0, self.last_tokens.shape[1] - 1), value=NONE))
        return Accepted(counts, drafted, rows)

    def _verify(self, step: StepBatch[Tensor], tokens: Tensor, simulated: Tensor | None) -> tuple[Tensor, Tensor]:
        """`counts` and `drafted` of Accepted."""
        num_decode, q, slots = step.num_decode, step.num_queries, step.sample_slots
        own, chunks = slots[:num_decode], self._ones[: slots.shape[0] - num_decode]
        drafts, room = self.last_tokens[own, 1:q], self.capacity[own] - self.lengths[own]
        if simulated is None:
            held = tokens[: num_decode * q].view(num_decode, q)[:, :-1] == drafts
        else:
            held = _hold(self.lengths[own] + own, simulated[: q - 1])
        counts = torch.minimum(_leading(held) + 1, room)
        drafted = torch.minimum(_leading(drafts >= 0), (room - 1).clamp_(min=0))
        return torch.cat((counts, chunks)), torch.cat((drafted, chunks - 1))


Rows = tuple[Tensor, Tensor]  # int64 [T] twice: the row's sequence, and its place among the sequence's rows


def decode_rows(count: int, num_queries: int, device: torch.device) -> Rows:
    """The rows of `count` sequences with equally many rows."""
    seqs, places = torch.arange(count, device=device), torch.arange(num_queries, device=device)
    return seqs.repeat_interleave(num_queries), places.repeat(count)


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


def _leading(held: Tensor) -> Tensor:
    """bool [D, k] -> int64 [D]: how many are true before the first that is not"""
    return held.long().cumprod(1).sum(1)


def _last_accepted(step: StepBatch[Tensor], counts: Tensor) -> Tensor:
    """int64 [S]: which of the R sampled rows gives each sequence its newest token. `counts` [S] of padding are 0."""
    rows = torch.arange(step.sample_rows.shape[0], device=counts.device)
    first = step.num_decode * step.num_queries
    return torch.cat((rows[: first : step.num_queries] + (counts[: step.num_decode] - 1).clamp_(min=0), rows[first:]))


def _hold(keys: Tensor, probabilities: Tensor) -> Tensor:
    """bool [D, k]: one draw of each key [D] decides how many drafts hold."""
    return (mix32(keys).double() / 2**32)[:, None] < probabilities
