"""Sampling parameters as arrays: one row per sampled token of the step.

Parameters that every request has are kept per slot and gathered. The rare ones (penalties, logit_bias, min_tokens,
logprobs, grammar) live in `Extras`, and cost time only in steps in which somebody has them. A batch exists twice: with
numpy arrays on the host, which decide what has to be done, and with tensors on the device (engine/step/staging.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import numpy as np

from millrace_serve.engine.schedule.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor  # the simulated engine works without it

A = TypeVar("A")  # numpy array or tensor
LEAST_REPETITION = 1e-3  # a penalty below counts as this: the quotient of a logit would be infinite
LEAST_TEMPERATURE = 1e-5  # below is greedy: the quotient of a logit would be infinite, or larger than all noise


@dataclass(slots=True)
class Penalties(Generic[A]):
    """Rows of the runner's tables of seen tokens. A `joined` row is cleared and filled before it is used."""

    samples: A  # int64 [N], which of the S rows have penalties
    rows: A  # int64 [N], their table rows
    repetition: A  # float32 [N]
    presence: A  # float32 [N]
    frequency: A  # float32 [N]
    joined: list[tuple[int, A, A]]  # (table row, prompt tokens, output tokens so far)


@dataclass(slots=True)
class SamplingBatch(Generic[A]):
    temperature: A  # float32 [S], 0 = greedy
    top_p: A  # float32 [S]
    min_p: A  # float32 [S]
    top_k: A  # int64 [S], 0 = whole vocabulary
    seeds: A  # u64 [S]; the same bits as int64 on the device
    output_index: A  # int64 [S], 0-based output position in the room
    drawn: A  # int64, the rows with temperature > 0
    num_logprobs: int = -1  # the largest number of most likely tokens wanted; -1: nobody wants logprobs
    penalties: Penalties[A] | None = None
    bias: tuple[A, A, A] | None = None  # (sample, token, float32 added to its logit)
    grammar: tuple[A, A] | None = None  # int64 [G] samples, int32 [G, ceil(V / 32)] their masks

    @property
    def is_greedy(self) -> bool:
        """Argmax of the logits as they are, and nothing else."""
        rare = self.penalties is None and self.bias is None and self.grammar is None
        return rare and self.num_logprobs < 0 and not len(self.drawn)  # type: ignore[arg-type]


HostSampling: TypeAlias = SamplingBatch[np.ndarray]
DeviceSampling: TypeAlias = "SamplingBatch[Tensor]"


def no_samples() -> HostSampling:
    floats, ints = np.zeros(0, np.float32), np.zeros(0, np.int64)
    return SamplingBatch(floats, floats, floats, ints, np.zeros(0, np.uint64), ints, ints)


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
        temperature = params.temperature if params.temperature >= LEAST_TEMPERATURE else 0.0
        self._floats[slot] = temperature, params.top_p, params.min_p
        self._top_k[slot] = params.top_k
        self._seeds[slot] = params.seed
        old = self._extras.pop(slot, None)
        if old is not None and old.penalty_row >= 0:
            self._free_rows.append(old.penalty_row)
        min_tokens = params.min_tokens if seq.stop_ids else 0
        common = params.logprobs is None and not params.logit_bias and not min_tokens and seq.grammar is None
        if common and not params.needs_token_counts:
            return
        logprobs = -1 if params.logprobs is None else params.logprobs
        bias = params.logit_bias
        extras = Extras(seq, logprobs, list(bias.keys()), list(bias.values()), min_tokens)
        if params.needs_token_counts:
            extras.penalty_row = self._take_row()
        self._extras[slot] = extras

    def gather(self, slots: np.ndarray, output_index: np.ndarray) -> HostSampling:
        """`slots` of the sampled rows, and the output positions that they sample."""
        floats = self._floats[slots]
        columns = floats[:, 0], floats[:, 1], floats[:, 2]
        drawn = np.flatnonzero(columns[0] > 0)
        batch = SamplingBatch(*columns, self._top_k[slots], self._seeds[slots], output_index, drawn)
        if self._extras:
            found = [(s, self._extras[slot]) for s, slot in enumerate(slots.tolist()) if slot in self._extras]
            if found:
                self._add_extras(batch, found)
        return batch

    def _add_extras(self, batch: HostSampling, found: list[tuple[int, Extras]]) -> None:
        batch.num_logprobs = max(extras.logprobs for _, extras in found)
        batch.bias = _bias(batch.output_index, found)
        batch.grammar = _grammar(found)
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


def _grammar(found: list[tuple[int, Extras]]) -> tuple[np.ndarray, np.ndarray] | None:
    """Copies of the masks as they are now: of the outputs committed so far, which is all there are (`undecided`)."""
    walks = [(s, extras.seq.grammar) for s, extras in found if extras.seq.grammar is not None]
    if not walks:
        return None
    return np.array([s for s, _ in walks], np.int64), np.stack([walk.mask for _, walk in walks])


def _penalties(penalized: list[tuple[int, Extras]]) -> Penalties[np.ndarray]:
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
        np.array([max(p.repetition_penalty, LEAST_REPETITION) for p in params], np.float32),
        np.array([p.presence_penalty for p in params], np.float32),
        np.array([p.frequency_penalty for p in params], np.float32),
        joined,
    )
