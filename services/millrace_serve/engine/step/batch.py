"""Plan -> StepBatch: the step's arrays, numpy only.

What does not change from step to step is kept per slot and gathered; only joined sequences, new pages and prompt
chunks cost Python time per item. Letters: T tokens, B sequences, S sampled rows, P pages of the longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from millrace_common.page_hash import chain_hash

from millrace_serve.engine.cache.canary import CanaryBatch
from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.schedule.plan import Plan
from millrace_serve.engine.schedule.sequence import Sequence
from millrace_serve.engine.step.canary_tracker import CanaryTracker
from millrace_serve.engine.step.sampling_batch import HostSampling, SamplingTable, no_samples

_NONE = np.zeros(0, np.int64)


@dataclass(slots=True)
class OracleRows:
    """What the simulated runner answers to instead of logits."""

    prompt_hashes: np.ndarray  # u64 [S], chain hash of the room's prompt
    eos_from: np.ndarray  # int64 [S], first output position at which EOS may come


@dataclass(slots=True)
class StepBatch:
    """Sequences in order `[decode | chunks]`. A negative token id -1-s means: the last token sampled on slot s."""

    num_decode: int
    token_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    kv_slots: np.ndarray  # int64 [T], page * page_size + offset
    page_table: np.ndarray  # int32 [B, P], 0 past the end
    q_lens: np.ndarray  # int32 [B]
    seq_lens: np.ndarray  # int32 [B], this step's tokens included
    sample_rows: np.ndarray  # int64 [S]
    sample_slots: np.ndarray  # int64 [S], where the sampled tokens are kept for the next step
    sampling: HostSampling
    preset: tuple[np.ndarray, np.ndarray] | None = None  # int64 [J] slots and tokens to set before the step
    oracle: OracleRows | None = None
    canary: CanaryBatch | None = None
    dp_num_tokens: tuple[int, ...] = ()  # T of every data-parallel replica; empty when dp == 1
    all_decode: bool = False  # no replica has a prompt chunk in this step

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """There is no prompt chunk."""
        return self.num_decode == len(self.q_lens)

    @classmethod
    def idle(cls) -> StepBatch:
        """No tokens: a replica without work takes part in the others' collectives."""
        lens = np.zeros(0, np.int32)
        pages = np.zeros((0, 1), np.int32)
        batch = cls(0, _NONE, _NONE, _NONE, pages, lens, lens, _NONE, _NONE, no_samples())
        batch.oracle = OracleRows(_NONE.astype(np.uint64), _NONE)
        return batch


class BatchBuilder:
    def __init__(self, config: EngineConfig, *, oracle: bool = False) -> None:
        slots, pages = config.max_running, -(-config.max_model_len // config.page_size)
        self._page_size = config.page_size
        self._page_table = np.zeros((slots, pages), np.int32)
        self._num_prompt = np.zeros(slots, np.int64)
        self._sampling = SamplingTable(slots)
        self._oracle = OracleRows(np.zeros(slots, np.uint64), np.zeros(slots, np.int64)) if oracle else None
        self._canary = CanaryTracker(slots, pages, config.page_size) if config.canary else None

    def build(self, plan: Plan) -> StepBatch:
        self._update(plan)
        decode, chunks = plan.decode, plan.chunks
        slots = np.fromiter([seq.slot for seq in decode], np.int64, len(decode))
        ends = np.fromiter([seq.num_scheduled for seq in decode], np.int64, len(decode))
        batch = self._rows(slots, ends) if not chunks else self._mixed_rows(plan, slots, ends)
        if plan.joined:
            slots = np.array([seq.slot for seq in plan.joined], np.int64)
            batch.preset = slots, np.array([seq.tokens[-1] for seq in plan.joined], np.int64)
        if self._oracle is not None:
            rows = batch.sample_slots
            batch.oracle = OracleRows(self._oracle.prompt_hashes[rows], self._oracle.eos_from[rows])
        if self._canary is not None:
            seqs = decode + [chunk.seq for chunk in chunks]
            batch.canary = self._canary.build(seqs, batch.page_table.shape[1])
        return batch

    def _update(self, plan: Plan) -> None:
        for seq in plan.grown:
            self._page_table[seq.slot, len(seq.pages) - 1] = seq.pages[-1]
        starts = {chunk.seq.slot: chunk.start for chunk in plan.chunks} if plan.joined else {}
        for seq in plan.joined:
            self._join(seq, starts.get(seq.slot, len(seq.request.token_ids)))

    def _join(self, seq: Sequence, num_ready: int) -> None:
        """A slot's new owner, whose first `num_ready` tokens have their KV."""
        slot = seq.slot
        row = self._page_table[slot]
        row[: len(seq.pages)] = seq.pages
        row[len(seq.pages) :] = 0
        self._num_prompt[slot] = seq.num_prompt
        self._sampling.join(seq)
        if self._oracle is not None:
            params = seq.request.sampling
            self._oracle.prompt_hashes[slot] = chain_hash(0, seq.tokens[: seq.num_prompt])
            self._oracle.eos_from[slot] = np.iinfo(np.int64).max if params.ignore_eos else params.min_tokens
        if self._canary is not None:
            self._canary.join(seq, num_ready)

    def _rows(self, slots: np.ndarray, ends: np.ndarray) -> StepBatch:
        """A step of decode sequences only: one row each."""
        size, count = self._page_size, len(slots)
        positions = ends - 1
        page_table = self._page_table[:, : self._width(ends)][slots]
        rows = np.arange(count)
        kv_slots = page_table[rows, positions // size].astype(np.int64) * size + positions % size
        sampling = self._sampling.gather(slots, ends - self._num_prompt[slots])
        ones, seq_lens = np.ones(count, np.int32), ends.astype(np.int32)
        tokens = -1 - slots
        return StepBatch(count, tokens, positions, kv_slots, page_table, ones, seq_lens, rows, slots, sampling)

    def _mixed_rows(self, plan: Plan, decode_slots: np.ndarray, decode_ends: np.ndarray) -> StepBatch:
        size, chunks, num_decode = self._page_size, plan.chunks, len(decode_slots)
        slots = np.concatenate((decode_slots, [chunk.seq.slot for chunk in chunks]))
        ends = np.concatenate((decode_ends, [chunk.end for chunk in chunks]))
        q_lens = np.ones(len(slots), np.int64)
        q_lens[num_decode:] = [chunk.end - chunk.start for chunk in chunks]
        last_rows = np.cumsum(q_lens) - 1
        tokens = np.concatenate((-1 - decode_slots, *(chunk.seq.tokens[chunk.start : chunk.end] for chunk in chunks)))
        seq_of_row = np.repeat(np.arange(len(slots)), q_lens)
        positions = np.arange(len(tokens)) + (ends - 1 - last_rows)[seq_of_row]
        page_table = self._page_table[:, : self._width(ends)][slots]
        kv_slots = page_table[seq_of_row, positions // size].astype(np.int64) * size + positions % size
        samples = np.ones(len(slots), bool)
        samples[num_decode:] = [chunk.samples for chunk in chunks]
        sample_slots = slots[samples]
        sampling = self._sampling.gather(sample_slots, ends[samples] - self._num_prompt[sample_slots])
        q_lens, seq_lens = q_lens.astype(np.int32), ends.astype(np.int32)
        rows = last_rows[samples]
        return StepBatch(
            num_decode, tokens, positions, kv_slots, page_table, q_lens, seq_lens, rows, sample_slots, sampling
        )

    def _width(self, ends: np.ndarray) -> int:
        return -(-int(ends.max()) // self._page_size)
