"""Sampling parameters as arrays: one row per sampled sequence of the step.

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

    samples: A  # int64 [N], which of the S rows have penalties
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
    temperature: A  # float32 [S], 0 = greedy
    top_p: A  # float32 [S]
    min_p: A  # float32 [S]
    top_k: A  # int64 [S], 0 = whole vocabulary
    seeds: A  # u64 [S]; the same bits as int64 on the device
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


class SamplingTable:
    def __init__(self, num_slots: int) -> None:
        self._floats = np.zeros((num_slots, 3), np.float32)  # temperature, top_p, min_p
        self._top_k = np.zeros(num_slots, np.int64)
        self._seeds = np.zeros(num_slots, np.uint64)
        self._extras: dict[int, Extras] = {}  # by slot; an entry stays until the slot's next owner comes
        self._free_rows: list[int] = []
        self._new_rows = itertools.count()

    def join(self, seq: Sequence) -> None:
        params, slot = seq.request.sampling, seq.slot
        temperature = params.temperature if params.temperature >= LEAST_TEMPERATURE else 0.0
        self._floats[slot] = temperature, params.top_p, params.min_p
        self._top_k[slot] = params.top_k
        self._seeds[slot] = params.seed
        old = self._extras.pop(slot, None)
        if old is not None and old.penalty_row >= 0:
            self._free_rows.append(old.penalty_row)
        biased = params.logit_bias or (params.min_tokens and seq.stop_ids)
        if params.needs_token_counts:
            self._extras[slot] = Extras(seq, self._free_rows.pop() if self._free_rows else next(self._new_rows))
        elif biased or params.logprobs is not None or seq.grammar is not None:
            self._extras[slot] = Extras(seq)

    def gather(self, slots: np.ndarray) -> HostSampling | None:
        """The parameters of the sampled sequences; None: argmax of the unchanged logits, without logprobs."""
        floats = self._floats[slots]
        drawn = np.flatnonzero(floats[:, 0] > 0)
        found = []
        if self._extras:
            found = [(s, self._extras[slot]) for s, slot in enumerate(slots.tolist()) if slot in self._extras]
        if not len(drawn) and not found:
            return None
        columns = floats[:, 0], floats[:, 1], floats[:, 2]
        batch = SamplingBatch(*columns, self._top_k[slots], self._seeds[slots], drawn)
        if found:
            _add_extras(batch, found)
        return batch


def _add_extras(batch: HostSampling, found: list[tuple[int, Extras]]) -> None:
    wanted = (extras.seq.request.sampling.logprobs for _, extras in found)
    batch.num_logprobs = max((count for count in wanted if count is not None), default=-1)
    batch.bias = _bias(found)
    batch.grammar = _grammar(found)
    penalized = [(s, extras) for s, extras in found if extras.penalty_row >= 0]
    if penalized:
        batch.penalties = _penalties(penalized)


def _bias(found: list[tuple[int, Extras]]) -> Bias[np.ndarray] | None:
    rows: list[tuple[int, int, float, int]] = []
    for s, extras in found:
        seq, params = extras.seq, extras.seq.request.sampling
        rows += [(s, token, value, ALWAYS) for token, value in params.logit_bias.items()]
        if seq.num_outputs < params.min_tokens:
            rows += [(s, token, -np.inf, params.min_tokens) for token in seq.stop_ids]
    if not rows:
        return None
    samples, tokens, values, until = zip(*rows, strict=True)
    return Bias(
        np.array(samples, np.int64), np.array(tokens, np.int64), np.array(values, np.float32), np.array(until, np.int64)
    )


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
