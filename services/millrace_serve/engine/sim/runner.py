"""A runner without a model: a timing model for when a step is done, and an oracle for what it samples. No torch.

    step seconds = fixed + per token + per sequence + per key, on one device that runs one step after the other
    token        = hash(prompt of the room, seed if sampling, output position)

The token depends neither on room, attempt, batch, worker nor replay, so a test can say what must come out. Pages
carry only their canary, which is always checked: a page of another request is an error, never a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from millrace_common.page_hash import chain_hash
from pydantic import BaseModel, ConfigDict, Field

from millrace_serve.engine.cache.canary import mismatches
from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.core import SamplingParams
from millrace_serve.engine.schedule.plan import StepOutput
from millrace_serve.engine.step.batch import StepBatch

SPECIAL_TOKENS = 16  # ids below are never drawn; the simulated EOS is one of them
MASK = (1 << 64) - 1
LENGTH_INDEX = -1  # output position whose hash decides the length


class SimSettings(BaseModel):
    """Costs in seconds. With `eos_lengths` (shortest, longest) each prompt's output ends by EOS at its own length."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: int = Field(32768, gt=SPECIAL_TOKENS)
    eos_token_id: int = Field(1, ge=0, lt=SPECIAL_TOKENS)
    eos_lengths: tuple[int, int] | None = None
    step_s: float = Field(0.0, ge=0)
    token_s: float = Field(0.0, ge=0)
    sequence_s: float = Field(0.0, ge=0)
    key_s: float = Field(0.0, ge=0)
    page_kv_bytes: int = Field(4096, ge=2, multiple_of=2)  # size of a page that travels, without its canary


def oracle_token(prompt_hash: int, seed: int, index: int, vocab: int) -> int:
    """Output token `index` of a prompt with chain_hash(0, prompt) == prompt_hash; greedy: seed 0. Never EOS."""
    return SPECIAL_TOKENS + _mix(_mix(prompt_hash ^ _mix(seed)) + index) % (vocab - SPECIAL_TOKENS)


def oracle_length(prompt_hash: int, settings: SimSettings) -> int | None:
    """Output length at which EOS comes, it included; None: never."""
    if settings.eos_lengths is None:
        return None
    low, high = settings.eos_lengths
    return low + _mix(_mix(prompt_hash) + (LENGTH_INDEX & MASK)) % (high - low + 1)


def oracle_outputs(prompt: list[int], params: SamplingParams, settings: SimSettings) -> list[int]:
    """Everything that a request must return if the context is long enough."""
    prompt_hash, seed = chain_hash(0, prompt), params.seed if params.temperature > 0 else 0
    end = None if params.ignore_eos else oracle_length(prompt_hash, settings)
    tokens: list[int] = []
    while len(tokens) < params.max_tokens:
        at_end = end is not None and len(tokens) >= max(end - 1, params.min_tokens)
        drawn = oracle_token(prompt_hash, seed, len(tokens), settings.vocab_size)
        tokens.append(settings.eos_token_id if at_end else drawn)
        if at_end or (drawn in params.stop_token_ids and len(tokens) > params.min_tokens):
            break
    return tokens


class SimHandle:
    def __init__(self, output: StepOutput, ready_at: float) -> None:
        self._output = output
        self._ready_at = ready_at

    def result(self) -> StepOutput:
        wait = self._ready_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        return self._output


class SimRunner:
    """Samples at launch; the handle is ready when the simulated device would be."""

    def __init__(self, settings: SimSettings, pool: KvPool, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._pool = pool
        self._clock = clock
        self._free_at = 0.0

    def launch(self, batch: StepBatch) -> SimHandle:
        corrupt = {}
        if batch.canary is not None:
            corrupt = mismatches(batch.canary, batch.page_table, self._pool.read_canaries(batch.page_table))
            self._pool.write_canaries(batch.canary.write_pages, batch.canary.write_words)
        self._free_at = max(self._clock(), self._free_at) + self._seconds(batch)
        return SimHandle(self._sample(batch, corrupt), self._free_at)

    def close(self) -> None:
        pass

    def _seconds(self, batch: StepBatch) -> float:
        s = self._settings
        keys = int(batch.seq_lens.sum()) if s.key_s else 0
        return s.step_s + s.token_s * batch.num_tokens + s.sequence_s * len(batch.q_lens) + s.key_s * keys

    def _sample(self, batch: StepBatch, corrupt: dict[int, str]) -> StepOutput:
        sampling, settings = batch.sampling, self._settings
        assert batch.oracle is not None, "the batch builder must be made with oracle=True"
        hashes = batch.oracle.prompt_hashes
        seeds = np.where(sampling.temperature > 0, sampling.seeds, np.uint64(0))
        drawn = _mix_array(_mix_array(hashes ^ _mix_array(seeds)) + sampling.output_index.astype(np.uint64))
        tokens = (drawn % np.uint64(settings.vocab_size - SPECIAL_TOKENS)).astype(np.int64) + SPECIAL_TOKENS
        if settings.eos_lengths is not None:
            low, high = settings.eos_lengths
            last = np.uint64(LENGTH_INDEX & MASK)
            lengths = _mix_array(_mix_array(hashes) + last) % np.uint64(high - low + 1) + np.uint64(low)
            ends = sampling.output_index >= np.maximum(lengths.astype(np.int64) - 1, batch.oracle.eos_from)
            tokens[ends] = settings.eos_token_id
        return _with_logprobs(StepOutput(tokens, corrupt=corrupt), sampling.num_logprobs, settings.vocab_size)


def _with_logprobs(output: StepOutput, count: int, vocab_size: int) -> StepOutput:
    """Made-up values: the sampled token has -1, the next ids -2, -3, ..."""
    if count >= 0:
        size = len(output.tokens)
        output.logprobs = np.full(size, -1.0, np.float32)
        output.top_ids = (output.tokens[:, None] + np.arange(count)) % vocab_size
        output.top_logprobs = np.tile(-1.0 - np.arange(count, dtype=np.float32), (size, 1))
    return output


def _mix(x: int) -> int:
    """splitmix64 (Steele, Lea, Flood 2014): a bijection of u64 without visible structure."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def _mix_array(x: np.ndarray) -> np.ndarray:
    """`_mix` of u64 [N]; numpy's unsigned arithmetic wraps around."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
