"""A step in two parts: while one part's rows travel to other ranks or back, the other part computes.

    main stream   attention A | attention B | experts A | experts B | attention A | …
    lane's stream             | send A      | send B    | sums A    | sums B      | …

Every rank cuts its rows in the middle, so all ranks know the sizes of all parts, and each takes its turns in the same
order. A sequence that is cut attends in part B to the keys that part A has written just before, in the same layer.
Whether a step is cut depends on the numbers of rows alone, which all ranks know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from millrace_serve.model.inputs import AttnPlan, ForwardInput
from millrace_serve.model.lane import Lane, Stages, T

NEVER = 1 << 62
DECODE_ROWS = 1024  # of a replica: steps with no more count as decode steps


@dataclass(frozen=True, slots=True)
class OverlapThresholds:
    """Rows of the longest replica from which a step is cut. An exchange has buffers for both parts only if one is not
    NEVER.
    """

    decode: int = NEVER
    prefill: int = NEVER

    @property
    def ever(self) -> bool:
        return min(self.decode, self.prefill) < NEVER

    def cuts(self, inputs: ForwardInput) -> bool:
        """The same on every rank: replicas have shared chunks, which are never cut, in the same steps."""
        most = max(inputs.dp_num_tokens, default=0)
        return inputs.shared is None and most >= (self.decode if most <= DECODE_ROWS else self.prefill)


THRESHOLDS = OverlapThresholds()  # not measured yet


class Overlap:
    """Cuts steps from `thresholds` on."""

    def __init__(self, device: torch.device, thresholds: OverlapThresholds) -> None:
        self.thresholds = thresholds
        # its kernels are short and other ranks wait for them, so they go first
        stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._lanes = Lane(0, stream), Lane(1, stream)

    def halves(self, inputs: ForwardInput) -> list[ForwardInput]:
        middles = [count // 2 for count in inputs.dp_num_tokens]
        rests = [count - middle for count, middle in zip(inputs.dp_num_tokens, middles, strict=True)]
        middle, end = len(inputs.token_ids) // 2, len(inputs.token_ids)
        cuts = ((0, middle, middles), (middle, end, rests))
        return [_part(inputs, *cut, lane) for cut, lane in zip(cuts, self._lanes, strict=True)]


def alternate(parts: Sequence[Stages[T]]) -> list[T]:
    """Runs the parts in turns, each to its next pause. The result of each."""
    results: dict[int, T] = {}
    while len(results) < len(parts):
        for index, part in enumerate(parts):
            if index in results:
                continue
            try:
                next(part)
            except StopIteration as end:
                results[index] = end.value
    return [results[index] for index in range(len(parts))]


def _part(inputs: ForwardInput, start: int, stop: int, counts: Sequence[int], lane: Lane) -> ForwardInput:
    """Rows [start, stop) of a step. `counts`: rows of this part on every replica."""
    rows, num_tokens = slice(start, stop), inputs.num_tokens
    return replace(
        inputs,
        token_ids=inputs.token_ids[rows],
        positions=inputs.positions[rows],
        kv_slots=inputs.kv_slots[rows],
        attn=_attn_part(inputs.attn, start, stop),
        sample_rows=inputs.sample_rows[:0],
        dp_num_tokens=tuple(counts),
        num_tokens=num_tokens if num_tokens is None or not start else (num_tokens - start).clamp_(min=0),
        lane=lane,
    )


def _attn_part(attn: AttnPlan, start: int, stop: int) -> AttnPlan:
    ends = list(accumulate(attn.q_lens_host))
    begins = [0, *ends][:-1]
    inside = [i for i, (begin, end) in enumerate(zip(begins, ends, strict=True)) if begin < stop and end > start]
    first, last = (inside[0], inside[-1] + 1) if inside else (0, 0)
    behind = max(ends[last - 1] - stop, 0) if inside else 0  # rows of the last sequence that are in the other part
    seqs, seq_lens = slice(first, last), attn.seq_lens[first:last]
    lens_host = list(attn.seq_lens_host[seqs])
    if behind:
        seq_lens = torch.cat((seq_lens[:-1], seq_lens[-1:] - behind))
        lens_host[-1] -= behind
    return AttnPlan(
        num_decode=min(max(attn.num_decode - first, 0), last - first),
        seq_lens=seq_lens,
        page_table=attn.page_table[seqs],
        q_lens_host=tuple(min(ends[i], stop) - max(begins[i], start) for i in inside),
        seq_lens_host=tuple(lens_host),
    )
