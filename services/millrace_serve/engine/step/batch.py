"""Plan -> StepBatch: the arrays that a step brings to the device.

The device keeps the state of each slot (engine/step/slots.py): how many tokens have their KV, the last tokens, the page
table. A step therefore brings the slots that run, the tokens of prompt chunks, and what changed in the slots. Positions
and KV slots are computed on the device, where the lengths are. A decode step costs the host little more than the list
of its slots; only joined sequences, new pages and prompt chunks cost Python time per item.

Letters: T tokens, B sequences, D of them decode sequences, q rows of each decode sequence (its last token and drafts),
S sampling sequences, R their sampled rows: q of a decode sequence, 1 of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from millrace_serve.engine.cache.canary import CanaryBatch
from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.schedule.plan import Chunk, Plan
from millrace_serve.engine.schedule.sequence import Sequence
from millrace_serve.engine.step.page_trackers import CanaryTracker, SumTracker
from millrace_serve.engine.step.sampling_batch import SamplingBatch, SamplingTable
from millrace_serve.model.context_parallel.split import Split

if TYPE_CHECKING:
    from torch import Tensor

FIXED_TOKENS = 256.0  # that a step costs beside its own
FAR_TOKENS = 16384.0  # a token that sees so many before it costs twice that of one that sees none
A = TypeVar("A")  # numpy array on the host, tensor on the device (engine/step/staging.py)
Array = TypeVar("Array", np.ndarray, "Tensor")


@dataclass(slots=True)
class SlotUpdates(Generic[A]):
    """The changes since the last step. A joined slot has a new owner."""

    page_slots: A  # int64 [U]; page_table[page_slots, page_indexes] = pages
    page_indexes: A  # int64 [U]
    pages: A  # int32 [U]
    grown: A  # int64 [G] slots with more pages, the joined ones included
    capacity: A  # int64 [G] positions that have a page
    joined: A  # int64 [J] slots
    lengths: A  # int64 [J] tokens whose KV is in the pages
    last_tokens: A  # int64 [J, 1+K] the newest token and the drafts that came with it; -1: no draft
    num_prompt: A  # int64 [J]
    temperature: A  # float32 [J]
    seeds: A  # u64 [J]; the same bits as int64 on the device


@dataclass(slots=True)
class ContextParallelChunk(Generic[A]):
    """A prompt chunk of which every replica computes a part. Only its owner has the arrays; others' are empty."""

    split: Split
    tokens: A  # int64 [n + 1], those of the chunk and the one behind it; 0 behind the end of the prompt
    slots: A  # int64 [1]


@dataclass(slots=True)
class StepBatch(Generic[A]):
    """Sequences in order `[decode | chunks]`, and their rows likewise; behind them the rows of the shared chunk's part.
    A shared chunk counts among the chunks only where they sample.
    """

    num_decode: int  # D
    num_queries: int  # q: so many rows of a decode sequence, and one draft less for each sampling sequence
    num_pages: int  # that the longest sequence of the step may use
    slots: A  # int64 [B]
    cu_q: A  # int32 [B+1], the first row of each sequence, and T; empty without chunks
    num_rows: A  # int32 [1], T and the rows of the shared part
    chunk_tokens: A  # int64 [T - D * q]
    next_tokens: A  # int64 [T - D * q], the tokens behind these, for the MTP layer; any where a chunk ends its prompt
    chunk_lens: tuple[int, ...]  # tokens of each chunk
    chunk_ends: tuple[int, ...]  # tokens of each chunk's sequence with the chunk
    sampling_chunks: tuple[int, ...]  # indices of the chunks that end their prompts; the shared one is behind the last
    sample_rows: A  # int64 [R]: all rows of the decode sequences, then the last row of each chunk that ends its prompt
    sample_slots: A  # int64 [S]
    sampling: SamplingBatch[A] | None  # None: argmax, and no logprobs
    shared: ContextParallelChunk[A] | None = None
    updates: SlotUpdates[A] | None = None
    canary: CanaryBatch[A] | None = None
    summed: A | None = None  # int64, the pages that get a checksum behind the step
    dp_num_tokens: tuple[int, ...] = ()  # T of every data-parallel replica; empty when dp == 1
    dp_num_sampled: tuple[int, ...] = ()  # S of every replica likewise
    all_decode: bool = False  # no replica has a prompt chunk in this step

    @property
    def num_tokens(self) -> int:
        return self.num_decode * self.num_queries + sum(self.chunk_lens)

    @property
    def is_decode(self) -> bool:
        """There is no prompt chunk."""
        return not self.chunk_lens and self.shared is None

    @property
    def num_sampled(self) -> int:
        return self.num_decode + len(self.sampling_chunks)

    @property
    def weight(self) -> float:
        """The work of a step with prompt chunks of this replica, in tokens that see none before them."""
        chunks = list(zip(self.chunk_lens, self.chunk_ends, strict=True))
        if self.shared is not None:
            chunks.append((self.shared.split.num_tokens, self.shared.split.end))
        return FIXED_TOKENS + sum(length * (1 + end / FAR_TOKENS) for length, end in chunks) + self.num_decode

    @classmethod
    def decode(
        cls,
        slots: Array,
        num_queries: int,
        num_pages: int,
        num_rows: Array,
        sample_rows: Array,
        sampling: SamplingBatch[Array] | None = None,
    ) -> StepBatch[Array]:
        """A step without chunks."""
        return StepBatch(
            num_decode=len(slots),
            num_queries=num_queries,
            num_pages=num_pages,
            slots=slots,
            cu_q=slots[:0],
            num_rows=num_rows,
            chunk_tokens=slots[:0],
            next_tokens=slots[:0],
            chunk_lens=(),
            chunk_ends=(),
            sampling_chunks=(),
            sample_rows=sample_rows,
            sample_slots=slots,
            sampling=sampling,
        )

    @classmethod
    def idle(cls, num_queries: int = 1) -> StepBatch[np.ndarray]:
        """No tokens: a replica without work takes part in the collectives of the others."""
        none = np.zeros(0, np.int64)
        return cls.decode(none, num_queries, 1, np.zeros(1, np.int32), none)


HostBatch = StepBatch[np.ndarray]
_slot, _num_reserved = attrgetter("slot"), attrgetter("num_reserved")  # faster than a loop, once per row and step


class BatchBuilder:
    def __init__(self, config: EngineConfig, on_join: Callable[[Sequence], None] | None = None) -> None:
        """`on_join` sees every new owner of a slot before the step that brings it to the device."""
        num_slots = config.max_running
        self._config = config
        self._sent_pages = [0] * num_slots
        self._sampling = SamplingTable(num_slots)
        self._canary = CanaryTracker(config) if "canary" in config.checks else None
        self._sums = SumTracker(config) if "checksum" in config.checks else None
        self._on_join = on_join

    def build(self, plan: Plan, num_queries: int = 1, split: Split | None = None) -> HostBatch:
        """
        Args:
            num_queries: as in StepBatch, at most EngineConfig.most_queries
            split: of the shared chunk, which is in the plan of its owner
        """
        updates = self._updates(plan) if plan.joined or plan.grown else None
        if plan.chunks or split is not None:
            batch = self._mixed_step(plan, num_queries, split)
        else:
            batch = self._decode_step(plan, num_queries)
        batch.updates = updates
        if self._canary is not None:
            batch.canary = self._canary.build(plan.decode + [chunk.seq for chunk in plan.chunks], batch.num_pages)
        if self._sums is not None and len(pages := self._sums.build(plan)):
            batch.summed = pages
        return batch

    def _updates(self, plan: Plan) -> SlotUpdates[np.ndarray]:
        joined = list(dict.fromkeys(plan.joined))
        starts = {chunk.seq.slot: chunk.start for chunk in plan.chunks} if joined else {}
        lengths = [starts.get(seq.slot, min(seq.num_computed, len(seq.tokens) - 1)) for seq in joined]
        for seq, length in zip(joined, lengths, strict=True):
            self._join(seq, length)
        grown = list(dict.fromkeys((*joined, *plan.grown)))
        slots = _int64([seq.slot for seq in grown])
        first = [self._sent_pages[seq.slot] for seq in grown]
        for seq in grown:
            self._sent_pages[seq.slot] = len(seq.pages)
        # The null page: those entries are of a former owner of the slot, and its pages may hold anything by now.
        behind = [0] * self._config.pages_behind
        spans = [range(start, len(seq.pages) + len(behind)) for seq, start in zip(grown, first, strict=True)]
        new = ((*seq.pages[start:], *behind) for seq, start in zip(grown, first, strict=True))
        return SlotUpdates(
            page_slots=np.repeat(slots, [len(span) for span in spans]),
            page_indexes=_int64(list(chain.from_iterable(spans))),
            pages=np.array(list(chain.from_iterable(new)), np.int32),
            grown=slots,
            capacity=_int64([len(seq.pages) * self._config.page_size for seq in grown]),
            joined=_int64([seq.slot for seq in joined]),
            lengths=_int64(lengths),
            last_tokens=self._last_tokens(joined),
            num_prompt=_int64([seq.num_prompt for seq in joined]),
            temperature=self._sampling.temperature[[seq.slot for seq in joined]],
            seeds=self._sampling.seeds[[seq.slot for seq in joined]],
        )

    def _last_tokens(self, seqs: list[Sequence]) -> np.ndarray:
        """int64 [len(seqs), 1+K]"""
        last = np.full((len(seqs), self._config.most_queries), -1)
        for row, seq in zip(last, seqs, strict=True):
            known = seq.row_tokens[: len(row)]
            row[: len(known)] = known
        return last

    def _join(self, seq: Sequence, num_ready: int) -> None:
        """A slot's new owner, whose first `num_ready` tokens have their KV."""
        self._sent_pages[seq.slot] = 0
        self._sampling.join(seq)
        if self._canary is not None:
            self._canary.join(seq, num_ready)
        if self._sums is not None:
            self._sums.join(seq, num_ready)
        if self._on_join is not None:
            self._on_join(seq)

    def _decode_step(self, plan: Plan, q: int) -> HostBatch:
        count = len(plan.decode)
        slots = np.fromiter(map(_slot, plan.decode), np.int64, count)
        num_rows, sampling = np.array([count * q], np.int32), self._sampling.gather(slots, count, q)
        return StepBatch.decode(slots, q, self._width(plan), num_rows, np.arange(count * q), sampling)

    def _mixed_step(self, plan: Plan, q: int, split: Split | None) -> HostBatch:
        chunks, num_decode = [chunk for chunk in plan.chunks if not chunk.shared], len(plan.decode)
        slots = _int64([seq.slot for seq in plan.decode] + [chunk.seq.slot for chunk in chunks])
        chunk_lens = tuple([chunk.end - chunk.start for chunk in chunks])
        cu_q = np.zeros(len(slots) + 1, np.int32)
        np.cumsum((q,) * num_decode + chunk_lens, out=cu_q[1:])
        num_rows = cu_q[-1:] + (0 if split is None else split.num_rows(split.me))
        sampling_chunks = tuple([index for index, chunk in enumerate(plan.chunks) if chunk.samples])
        ends = (*cu_q[num_decode + 1 :].tolist(), int(num_rows[0]))
        last_rows = _int64([ends[index] - 1 for index in sampling_chunks])
        ending = _int64([plan.chunks[index].seq.slot for index in sampling_chunks])
        sample_slots = np.concatenate((slots[:num_decode], ending))
        return StepBatch(
            num_decode=num_decode,
            num_queries=q,
            num_pages=self._width(plan),
            slots=slots,
            cu_q=cu_q,
            num_rows=num_rows,
            chunk_tokens=_tokens(chunks),
            next_tokens=_tokens(chunks, 1) if self._config.most_queries > 1 else np.zeros(0, np.int64),
            chunk_lens=chunk_lens,
            chunk_ends=tuple([chunk.end for chunk in chunks]),
            sampling_chunks=sampling_chunks,
            sample_rows=np.concatenate((np.arange(num_decode * q), last_rows)),
            sample_slots=sample_slots,
            sampling=self._sampling.gather(sample_slots, num_decode, q),
            shared=None if split is None else _shared(split, plan.shared),
        )

    def _width(self, plan: Plan) -> int:
        """Pages of the longest sequence at the end of the step, by the host's upper bound; rows of a sequence may lie
        behind it (engine/step/slots.py).
        """
        longest = max(map(_num_reserved, plan.decode), default=1)
        for chunk in plan.chunks:
            longest = max(longest, chunk.end)
        return -(-(longest + self._config.most_queries - 1) // self._config.page_size)


def _tokens(chunks: list[Chunk], ahead: int = 0) -> np.ndarray:
    """The tokens `ahead` places behind those of the chunks; 0 behind the end of a sequence."""
    tokens, first = np.zeros(sum(chunk.end - chunk.start for chunk in chunks), np.int64), 0
    for chunk in chunks:
        known = memoryview(chunk.seq.tokens)[chunk.start + ahead : chunk.end + ahead]
        tokens[first : first + len(known)] = known
        first += chunk.end - chunk.start
    return tokens


def _shared(split: Split, chunk: Chunk | None) -> ContextParallelChunk[np.ndarray]:
    """`chunk`: None where another replica has the sequence."""
    if chunk is None:
        return ContextParallelChunk(split, _int64([]), _int64([]))
    return ContextParallelChunk(split, _tokens([replace(chunk, end=chunk.end + 1)]), _int64([chunk.seq.slot]))


def _int64(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)
