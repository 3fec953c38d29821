"""Sampling parameters as arrays: one row per sampled token of the step.

Parameters that every request has are kept per slot and gathered. The rare ones (penalties, logit_bias, min_tokens,
logprobs) live in `Extras`, and cost time only in steps in which somebody has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from millrace_serve.engine.sequence import Sequence


@dataclass(slots=True)
class Penalties:
    """Rows of the runner's tables of seen tokens. A `joined` row is cleared and filled before it is used."""

    samples: np.ndarray  # int64 [N], which of the S rows have penalties
    rows: np.ndarray  # int64 [N], their table rows
    repetition: np.ndarray  # float32 [N]
    presence: np.ndarray  # float32 [N]
    frequency: np.ndarray  # float32 [N]
    joined: list[tuple[int, np.ndarray, np.ndarray]]  # (table row, prompt tokens, output tokens so far)


@dataclass(slots=True)
class SamplingBatch:
    temperature: np.ndarray  # float32 [S], 0 = greedy
    top_p: np.ndarray  # float32 [S]
    min_p: np.ndarray  # float32 [S]
    top_k: np.ndarray  # int64 [S], 0 = whole vocabulary
    seeds: np.ndarray  # u64 [S]
    output_index: np.ndarray  # int64 [S], 0-based output position in the room
    num_logprobs: int = -1  # the largest number of most likely tokens wanted; -1: nobody wants logprobs
    penalties: Penalties | None = None
    bias: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None  # (sample, token, float32 added to its logit)

    @classmethod
    def empty(cls) -> SamplingBatch:
        floats, ints = np.zeros(0, np.float32), np.zeros(0, np.int64)
        return cls(floats, floats, floats, ints, np.zeros(0, np.uint64), ints)


@dataclass(slots=True)
class Extras:
    seq: Sequence
    logprobs: int
    bias_tokens: list[int]
    bias_values: list[float]
    min_tokens: int
    penalty_row: int = -1
    penalty_ready: bool = False


class SamplingTable:
    def __init__(self, num_slots: int) -> None:
        self._floats = np.zeros((num_slots, 3), np.float32)  # temperature, top_p, min_p
        self._top_k = np.zeros(num_slots, np.int64)
        self._seeds = np.zeros(num_slots, np.uint64)
        self._extras: dict[int, Extras] = {}  # by slot; an entry stays until the slot's next owner comes
        self._free_rows: list[int] = []
        self._num_rows = 0

    def join(self, seq: Sequence) -> None:
        params, slot = seq.request.sampling, seq.slot
        self._floats[slot] = params.temperature, params.top_p, params.min_p
        self._top_k[slot] = params.top_k
        self._seeds[slot] = params.seed
        old = self._extras.pop(slot, None)
        if old is not None and old.penalty_row >= 0:
            self._free_rows.append(old.penalty_row)
        min_tokens = params.min_tokens if seq.stop_ids else 0
        if params.logprobs is None and not params.logit_bias and not min_tokens and not params.needs_token_counts:
            return
        logprobs = -1 if params.logprobs is None else params.logprobs
        bias = params.logit_bias
        extras = Extras(seq, logprobs, list(bias.keys()), list(bias.values()), min_tokens)
        if params.needs_token_counts:
            extras.penalty_row = self._take_row()
        self._extras[slot] = extras

    def gather(self, slots: np.ndarray, output_index: np.ndarray) -> SamplingBatch:
        """`slots` of the sampled rows, and the output positions that they sample."""
        floats = self._floats[slots]
        columns = floats[:, 0], floats[:, 1], floats[:, 2]
        batch = SamplingBatch(*columns, self._top_k[slots], self._seeds[slots], output_index)
        if self._extras:
            found = [(s, self._extras[slot]) for s, slot in enumerate(slots.tolist()) if slot in self._extras]
            if found:
                self._add_extras(batch, found)
        return batch

    def _add_extras(self, batch: SamplingBatch, found: list[tuple[int, Extras]]) -> None:
        batch.num_logprobs = max(extras.logprobs for _, extras in found)
        batch.bias = _bias(batch.output_index, found)
        penalized = [(s, extras) for s, extras in found if extras.penalty_row >= 0]
        if penalized:
            batch.penalties = _penalties(penalized)

    def _take_row(self) -> int:
        if self._free_rows:
            return self._free_rows.pop()
        self._num_rows += 1
        return self._num_rows - 1


def _bias(
    output_index: np.ndarray, found: list[tuple[int, Extras]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """logit_bias, and -inf on the stop tokens of sequences that are shorter than min_tokens."""
    samples: list[int] = []
    tokens: list[int] = []
    values: list[float] = []
    for s, extras in found:
        tokens += extras.bias_tokens
        values += extras.bias_values
        if output_index[s] < extras.min_tokens:
            tokens += extras.seq.stop_ids
            values += [-np.inf] * len(extras.seq.stop_ids)
        samples += [s] * (len(tokens) - len(samples))
    if not samples:
        return None
    return np.array(samples, np.int64), np.array(tokens, np.int64), np.array(values, np.float32)


def _penalties(penalized: list[tuple[int, Extras]]) -> Penalties:
    joined = []
    for _, extras in penalized:
        if not extras.penalty_ready:
            seq = extras.seq
            prompt, outputs = seq.tokens[: seq.num_prompt], seq.tokens[seq.num_prompt :]
            joined.append((extras.penalty_row, np.array(prompt, np.int64), np.array(outputs, np.int64)))
            extras.penalty_ready = True
    params = [extras.seq.request.sampling for _, extras in penalized]
    return Penalties(
        np.array([s for s, _ in penalized], np.int64),
        np.array([extras.penalty_row for _, extras in penalized], np.int64),
        np.array([p.repetition_penalty for p in params], np.float32),
        np.array([p.presence_penalty for p in params], np.float32),
        np.array([p.frequency_penalty for p in params], np.float32),
        joined,
    )
