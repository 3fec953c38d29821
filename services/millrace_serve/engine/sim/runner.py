"""A runner without a model: a timing model for the end of a step, and an oracle for its tokens. No torch.

    step seconds = fixed + per token + per sequence + per key, on one device that runs one step after the other;
                   the fixed part once, also where prompts and decoding sequences share the step
    token        = hash(prompt of the room, seed if sampling, output position)
    accepted     = 1 + the drafts before the first that hash(prompt, output position) rejects

The token depends neither on room, attempt, batch, worker, drafts nor replay, so a test can compute what must come out.
Pages carry only their canary, which is always checked: a page of another request is an error, never a token. Like the
real device, the simulated one keeps the state of each slot, and the host learns the lengths one step late.
"""

import time
from collections.abc import Callable, Collection
from typing import Annotated, ClassVar

import numpy as np
from millrace_common.config import Config, Count, Seconds
from millrace_common.page_hash import page_hashes
from millrace_common.step_times import chunk_pairs
from pydantic import Field

from millrace_serve.engine.cache.canary import mismatches
from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.core import Failure
from millrace_serve.engine.schedule.plan import StepOutput
from millrace_serve.engine.schedule.sequence import Sequence
from millrace_serve.engine.step.batch import HostBatch

SPECIAL_TOKENS = 16  # ids below are never drawn; the simulated EOS is one of them
MOST = (1 << 64) - 1
LENGTH_INDEX = np.uint64(MOST)  # output position -1, whose hash decides the length


class SimSettings(Config):
    """Costs in seconds. With `eos_lengths` (shortest, longest) each prompt's output ends by EOS at its own length."""

    vocab_size: Count = Field(32768, gt=SPECIAL_TOKENS)
    eos_token_id: ClassVar[int] = 1
    eos_lengths: tuple[Annotated[Count, Field(ge=1)], Annotated[Count, Field(ge=1)]] | None = None
    step_s: Seconds = 0.0
    token_s: Seconds = 0.0
    sequence_s: Seconds = 0.0
    key_s: Seconds = 0.0
    pair_s: Seconds = 0.0  # of each pair of a chunk (millrace_common/step_times.py)
    acceptance: float = Field(0.7, ge=0, le=1)  # probability that a draft token is accepted
    page_kv_bytes: Count = Field(4096, ge=2, multiple_of=2)  # bytes of a transferred page, without its canary


class SimHandle:
    def __init__(self, output: StepOutput, ready_at: float) -> None:
        self._output = output
        self._ready_at = ready_at

    def done(self) -> bool:
        return self._ready_at <= time.monotonic()

    def result(self) -> StepOutput:
        wait = self._ready_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        return self._output


def prompt_hash(prompt: Collection[int]) -> int:
    """Return the u64 from which all outputs of a prompt follow."""
    [block] = page_hashes(prompt, len(prompt))
    return int.from_bytes(block[:8], "little")


class SimRunner:
    """Launched steps are computed at once, and are ready when the simulated device would be."""

    def __init__(
        self, settings: SimSettings, pool: KvPool, config: EngineConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._page_size = config.page_size
        self._clock = clock
        self._free_at = 0.0
        slots = config.max_running
        self._lengths = np.zeros(slots, np.int64)
        self._capacity = np.zeros(slots, np.int64)
        self._num_prompt = np.zeros(slots, np.int64)
        self._page_table = np.zeros((slots, config.table_width), np.int32)
        self._prompt_hash = np.zeros(slots, np.uint64)
        self._eos_from = np.zeros(slots, np.int64)  # the first output that may be EOS

    def join(self, seq: Sequence) -> None:
        """A slot's new owner, for the oracle."""
        params = seq.request.sampling
        self._prompt_hash[seq.slot] = prompt_hash(seq.tokens[: seq.num_prompt])
        self._eos_from[seq.slot] = np.iinfo(np.int64).max if params.ignore_eos else params.min_tokens

    def launch(self, batch: HostBatch) -> SimHandle:
        self._update(batch)
        corrupt: dict[int, Failure] = {}
        if batch.canary is not None:
            corrupt = mismatches(batch.canary, self._pool.read_canaries(batch.canary.pages))
            self._pool.write_canaries(batch.canary.write_pages, batch.canary.write_words)
        self._free_at = max(self._clock(), self._free_at) + self._seconds(batch)
        output = self._sample(batch, corrupt)
        self._advance(batch, output.counts)
        return SimHandle(output, self._free_at)

    def counts(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        pass

    def _update(self, batch: HostBatch) -> None:
        if (updates := batch.updates) is not None:
            self._page_table[updates.page_slots, updates.page_indexes] = updates.pages
            self._capacity[updates.grown] = updates.capacity
            self._lengths[updates.joined] = updates.lengths
            self._num_prompt[updates.joined] = updates.num_prompt

    def _advance(self, batch: HostBatch, counts: np.ndarray) -> None:
        """Write the step's rows, which must have pages of their own, and take the accepted ones over."""
        slots = batch.slots if batch.shared is None else np.concatenate((batch.slots, batch.shared.slots))
        before, chunk_lens = self._lengths[slots], _chunk_lens(batch)[: len(slots) - batch.num_decode]
        after = before + np.concatenate((counts[: batch.num_decode], chunk_lens)).astype(np.int64)
        for slot, start, end in zip(slots.tolist(), before.tolist(), after.tolist(), strict=True):
            end = min(end, self._capacity[slot])
            pages = self._page_table[slot, start // self._page_size : -(-end // self._page_size)]
            assert pages.all(), f"slot {slot} has no page for some of its positions {start}..{end - 1}"
        self._lengths[slots] = after

    def _seconds(self, batch: HostBatch) -> float:
        s = self._settings
        tokens = int(batch.num_rows[0])
        keys = int(self._lengths[batch.slots].sum()) + tokens if s.key_s else 0
        known = self._lengths[batch.slots[batch.num_decode :]]
        pairs = sum(map(chunk_pairs, known.tolist(), batch.chunk_lens[: len(known)]))
        seconds = s.step_s + s.token_s * tokens + s.sequence_s * len(batch.slots)
        return seconds + s.key_s * keys + s.pair_s * pairs

    def _sample(self, batch: HostBatch, corrupt: dict[int, Failure]) -> StepOutput:
        """Row i of a decode sequence samples output `index` + i."""
        slots, settings = batch.sample_slots, self._settings
        hashes, num_decode = self._prompt_hash[slots], batch.num_decode
        index = self._lengths[slots] - self._num_prompt[slots]
        index[:num_decode] += 1
        chunk_lens = _chunk_lens(batch)
        index[num_decode:] += np.array([chunk_lens[chunk] for chunk in batch.sampling_chunks], np.int64)
        seeds = np.zeros(len(slots), np.uint64)
        if (sampling := batch.sampling) is not None:
            rows = np.arange(len(slots)) + np.minimum(np.arange(len(slots)), num_decode) * (batch.num_queries - 1)
            seeds = np.where(sampling.temperature[rows] > 0, sampling.seeds[rows], np.uint64(0))
        index = index[:, None] + np.arange(batch.num_queries)
        drawn = _mix(_mix(hashes ^ _mix(seeds))[:, None] + index.astype(np.uint64))
        tokens = (drawn % np.uint64(settings.vocab_size - SPECIAL_TOKENS)).astype(np.int64) + SPECIAL_TOKENS
        if settings.eos_lengths is not None:
            low, high = sorted(settings.eos_lengths)
            lengths = _mix(_mix(hashes) + LENGTH_INDEX) % np.uint64(high - low + 1) + np.uint64(low)
            ends = index >= np.maximum(lengths.astype(np.int64) - 1, self._eos_from[slots])[:, None]
            tokens[ends] = settings.eos_token_id
        counts, drafted = self._accept(batch, hashes, index)
        output = StepOutput(tokens, counts, drafted, tokens[:, :0], corrupt=corrupt)
        if sampling is not None and sampling.num_logprobs >= 0:  # made up: -1, -2, ... from the likeliest token on
            ranks = np.arange(sampling.num_logprobs)
            output.logprobs = np.full(tokens.shape, -1.0, np.float32)
            output.top_ids = (tokens[:, :, None] + ranks) % settings.vocab_size
            output.top_logprobs = np.tile(-1.0 - ranks.astype(np.float32), (*tokens.shape, 1))
        return output

    def _accept(self, batch: HostBatch, hashes: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [S] twice: the accepted rows of each sampled sequence, and its drafts, where positions have pages."""
        counts, drafted = np.ones(len(hashes), np.int64), np.zeros(len(hashes), np.int64)
        decode = slice(0, batch.num_decode)
        if batch.num_queries > 1 and batch.num_decode:
            draws = _mix(_mix(~hashes[decode])[:, None] + index[decode, 1:].astype(np.uint64))
            accepted = draws < np.uint64(min(int(self._settings.acceptance * MOST), MOST))
            room = self._capacity[batch.slots[decode]] - self._lengths[batch.slots[decode]]
            counts[decode] = np.clip(1 + np.cumprod(accepted, axis=1).sum(axis=1), 1, np.maximum(room, 1))
            drafted[decode] = np.clip(room - 1, 0, batch.num_queries - 1)
        return counts, drafted


def _chunk_lens(batch: HostBatch) -> tuple[int, ...]:
    """Tokens of each chunk, with the shared one as the last."""
    return batch.chunk_lens if batch.shared is None else (*batch.chunk_lens, batch.shared.split.num_tokens)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea, Flood 2014) of an array of u64: a bijection without visible structure."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
