"""Sampling parameters as arrays: one row per sampled row of the step, several of a sequence with drafts.

Parameters that every request has are kept per slot and gathered. The rare ones (penalties, logit_bias, min_tokens,
logprobs, grammar) live in `Extras`, and cost time only in steps in which a request has them. A batch exists twice: with
numpy arrays on the host, which control what is computed, and with tensors on the device (engine/step/staging.py).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import numpy as np

from millrace_serve.engine.schedule.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor  # the simulated engine works without it

A = TypeVar("A")  # numpy array or tensor
ALWAYS = np.iinfo(np.int64).max
LEAST_REPETITION = 1e-3  # a penalty below counts as this: the quotient of a logit would be infinite
LEAST_TEMPERATURE = 1e-5  # below is greedy: the quotient of a logit would be infinite, or larger than all noise


@dataclass(slots=True)
class Penalties(Generic[A]):
    """Rows of the runner's tables of seen tokens. A `joined` row is cleared and filled before it is used."""

    samples: A  # int64 [N], which of the R rows have penalties
    rows: A  # int64 [N], their table rows
    repetition: A  # float32 [N]
    presence: A  # float32 [N]
    frequency: A  # float32 [N]
    joined: list[tuple[int, A, A]]  # (table row, prompt tokens, output tokens so far)


@dataclass(slots=True)
class Bias(Generic[A]):
    """Additions to logits: logit_bias, and -inf on the stop tokens of outputs that are shorter than min_tokens."""

    samples: A  # int64 [N]
    tokens: A  # int64 [N]
    values: A  # float32 [N]
    until: A  # int64 [N]: only for outputs before this one; only the device has the output index of a row


@dataclass(slots=True)
class SamplingBatch(Generic[A]):
    temperature: A  # float32 [R], 0 = greedy
    top_p: A  # float32 [R]
    min_p: A  # float32 [R]
    top_k: A  # int64 [R], 0 = whole vocabulary
    seeds: A  # u64 [R]; the same bits as int64 on the device
    drawn: A  # int64, the rows with temperature > 0
    num_logprobs: int = -1  # the largest number of most likely tokens wanted; -1: no request wants logprobs
    penalties: Penalties[A] | None = None
    bias: Bias[A] | None = None
    grammar: tuple[A, A] | None = None  # int64 [G] samples, int32 [G, ceil(V / 32)] their masks


HostSampling: TypeAlias = SamplingBatch[np.ndarray]
DeviceSampling: TypeAlias = "SamplingBatch[Tensor]"


@dataclass(slots=True)
class Extras:
    seq: Sequence
    penalty_row: int = -1
    penalty_ready: bool = False


Found = tuple[range, Extras]  # the sampled rows of a sequence


class SamplingTable:
    def __init__(self, num_slots: int) -> None:
        self._floats = np.zeros((num_slots, 3), np.float32)  # temperature, top_p, min_p
        self._top_k = np.zeros(num_slots, np.int64)
        self.seeds = np.zeros(num_slots, np.uint64)
        self._extras: dict[int, Extras] = {}  # by slot; an entry stays until the slot's next owner comes
        self._free_rows: list[int] = []
        self._new_rows = itertools.count()

    def join(self, seq: Sequence) -> None:
        params, slot = seq.request.sampling, seq.slot
        temperature = params.temperature if params.temperature >= LEAST_TEMPERATURE else 0.0
        self._floats[slot] = temperature, params.top_p, params.min_p
        self._top_k[slot] = params.top_k
        self.seeds[slot] = params.seed
        old = self._extras.pop(slot, None)
        if old is not None and old.penalty_row >= 0:
            self._free_rows.append(old.penalty_row)
        biased = params.logit_bias or (params.min_tokens and seq.stop_ids)
        if params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self._extras[slot] = Extras(seq, self._free_rows.pop() if self._free_rows else next(self._new_rows))
        elif biased or params.logprobs is not None or seq.grammar is not None:
            self._extras[slot] = Extras(seq)

    @property
    def temperature(self) -> np.ndarray:
        """float32, by slot"""
        return self._floats[:, 0]

    def gather(self, slots: np.ndarray, num_decode: int, num_queries: int) -> HostSampling | None:
        """The parameters of the sampled rows; None: argmax of the unchanged logits, without logprobs.

        Args:
            slots: int64 [S]; the first `num_decode` have `num_queries` rows each, the others have one.
        """
        found = []
        if self._extras:
            found = [(s, self._extras[slot]) for s, slot in enumerate(slots.tolist()) if slot in self._extras]
        first = np.arange(len(slots))
        if num_queries > 1:
            counts = np.where(first < num_decode, num_queries, 1)
            first, slots = np.cumsum(counts) - counts, np.repeat(slots, counts)
        floats = self._floats[slots]
        drawn = np.flatnonzero(floats[:, 0] > 0)
        if not len(drawn) and not found:
            return None
        columns = floats[:, 0], floats[:, 1], floats[:, 2]
        batch = SamplingBatch(*columns, self._top_k[slots], self.seeds[slots], drawn)
        if found:
            rows = [range(first[s], first[s] + (num_queries if s < num_decode else 1)) for s, _ in found]
            _add_extras(batch, list(zip(rows, (extras for _, extras in found), strict=True)))
        return batch


def _add_extras(batch: HostSampling, found: list[Found]) -> None:
    wanted = (extras.seq.request.sampling.logprobs for _, extras in found)
    batch.num_logprobs = max((count for count in wanted if count is not None), default=-1)
    batch.bias = _bias(found)
    batch.grammar = _grammar(found)
    penalized = [(rows, extras) for rows, extras in found if extras.penalty_row >= 0]
    if penalized:
        batch.penalties = _penalties(penalized)


def _bias(found: list[Found]) -> Bias[np.ndarray] | None:
    rows: list[tuple[int, int, float, int]] = []
    for own, extras in found:
        seq, params = extras.seq, extras.seq.request.sampling
        rows += [(r, token, value, ALWAYS) for r in own for token, value in params.logit_bias.items()]
        if seq.num_outputs < params.min_tokens:
            rows += [(r, token, -np.inf, params.min_tokens) for r in own for token in seq.stop_ids]
    if not rows:
        return None
    samples, tokens, values, until = zip(*rows, strict=True)
    return Bias(
        np.array(samples, np.int64), np.array(tokens, np.int64), np.array(values, np.float32), np.array(until, np.int64)
    )


def _grammar(found: list[Found]) -> tuple[np.ndarray, np.ndarray] | None:
    """Copies of the masks as they are now: of the outputs committed so far, which is all there are (`awaited`), and
    of the rows behind them. Rows behind a token that the grammar does not allow need none: it is not accepted.
    """
    rows: list[int] = []
    masks: list[np.ndarray] = []
    for own, extras in found:
        if (walk := extras.seq.grammar) is not None:
            own_masks = walk.masks(extras.seq.row_tokens[1 : len(own)])
            rows += own[: len(own_masks)]
            masks += own_masks
    return (np.array(rows, np.int64), np.stack(masks)) if rows else None


def _penalties(penalized: list[Found]) -> Penalties[np.ndarray]:
    joined = []
    for _, extras in penalized:
        if not extras.penalty_ready:
            seq = extras.seq
            prompt, outputs = seq.tokens[: seq.num_prompt], seq.tokens[seq.num_prompt :]
            joined.append((extras.penalty_row, np.array(prompt, np.int64), np.array(outputs, np.int64)))
            extras.penalty_ready = True
    by_row = [(row, extras) for rows, extras in penalized for row in rows]
    params = [extras.seq.request.sampling for _, extras in by_row]
    return Penalties(
        np.array([row for row, _ in by_row], np.int64),
        np.array([extras.penalty_row for _, extras in by_row], np.int64),
        np.array([max(p.repetition_penalty, LEAST_REPETITION) for p in params], np.float32),
        np.array([p.presence_penalty for p in params], np.float32),
        np.array([p.frequency_penalty for p in params], np.float32),
        joined,
    )
