"""Predicted times of a step, between the measured ones.

    decode    a straight line in the number of sequences, plus a time for each cached token of all sequences
    prefill   for each token, a straight line in the length of a prompt

They are scaled by layers, by the type of KV and by what ranks send each other, each as a pair of runs says. Outside of
what was measured there is no prediction.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from millrace_serve.plan.facts import TimedStep, steps

FP8 = "float8_e4m3fn"
FULL = 4 * 4096  # prompt tokens from which on launches cost nothing beside the work
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class StepRanks:
    """What computes a step. shape: as in facts.toml."""

    gpu: str
    shape: str
    num_ranks: int
    layers: int
    fp8_kv: bool = False


@dataclass(frozen=True, slots=True)
class Prediction:
    ms: float
    files: tuple[str, ...]  # below bench/results
    scaled: tuple[str, ...]  # by what, besides interpolation


def decode(ranks: StepRanks, rows: int, context: int) -> Prediction | None:
    """Of `rows` sequences of each replica with `context` cached tokens each. None: nobody has timed so many
    sequences, or so many cached tokens of all."""
    found = _base(ranks, "decode")
    most = max((step.rows * step.context for step in found), default=0)
    if rows * context > most or not min(step.rows for step in found) <= rows <= max(step.rows for step in found):
        return None
    slope = _per_cached_token(found)
    line = _means((step.rows, _bf16_ms(step) - slope * step.rows * step.context) for step in found)
    return _prediction(ranks, found, _on(line, rows) + slope * rows * context, rows)


def prefill(ranks: StepRanks, length: int) -> Prediction | None:
    """Of one token of each replica, in a step full of prompts of `length` tokens. None: nobody has timed those."""
    found = [step for step in _base(ranks, "prefill") if step.rows * step.context >= FULL]
    line = _means((step.context, _bf16_ms(step) / _unit(step)) for step in found)
    if not line or not line[0][0] <= length <= line[-1][0]:
        return None
    return _prediction(ranks, found, _on(line, length), FULL)


def _base(ranks: StepRanks, kind: str) -> list[TimedStep]:
    """The steps to interpolate in: of a rank alone, or where there are none of ranks together."""
    alike = [step for step in steps() if (step.gpu, step.shape, step.kind) == (ranks.gpu, ranks.shape, kind)]
    return [step for step in alike if step.ranks == min(step.ranks for step in alike)]


def _prediction(ranks: StepRanks, found: Sequence[TimedStep], ms: float, rows: int) -> Prediction:
    """`ms`: of a layer, with KV in BF16. Fewer `rows` than were timed send each other less."""
    kind, shape, together = found[0].kind, ranks.shape, found[0].ranks
    files, scaled = {step.ms_at for step in found}, []
    if ranks.num_ranks > 1 and together == 1 and (pairs := _pairs(kind, shape, lambda step: step.ranks > 1)):
        added = statistics.mean((one.ms / one.layers - other.ms / other.layers) / _unit(one) for one, other in pairs)
        ms += added * min(rows / min(one.rows for one, _ in pairs), 1)
        files |= {one.ms_at for one, _ in pairs}
    most = max(step.ranks for step in steps() if (step.kind, step.shape) == (kind, shape))
    if ranks.num_ranks > most:
        scaled.append(f"{ranks.num_ranks} ranks exchange as {most}" if most > 1 else "without sums over ranks")
    if ranks.fp8_kv and (pairs := _pairs(kind, shape, lambda step: step.kv == FP8)):
        ms *= _kv_factor(kind, shape)
        files |= {one.ms_at for one, _ in pairs}
    if {step.layers for step in found} != {ranks.layers}:
        scaled.append("by layers")
    return Prediction(ms * ranks.layers, tuple(sorted({at.partition(":")[0] + ".json" for at in files})), tuple(scaled))


def _bf16_ms(step: TimedStep) -> float:
    """Of a layer, with KV in BF16."""
    return step.ms / step.layers / (_kv_factor(step.kind, step.shape) if step.kv == FP8 else 1.0)


def _kv_factor(kind: str, shape: str) -> float:
    """A step with KV in FP8 to one in BF16; 1 where nobody has timed both."""
    pairs = _pairs(kind, shape, lambda step: step.kv == FP8)
    return statistics.mean(one.ms / other.ms for one, other in pairs) if pairs else 1.0


def _pairs(kind: str, shape: str, only: Callable[[TimedStep], bool]) -> list[tuple[TimedStep, TimedStep]]:
    """Steps of one size with `only` and without it, which differ in nothing else that matters, of any GPU."""
    alike = [step for step in steps() if (step.kind, step.shape) == (kind, shape)]
    return [
        (one, other)
        for one, other in itertools.product(filter(only, alike), itertools.filterfalse(only, alike))
        if (one.gpu, one.rows, one.context, one.layers) == (other.gpu, other.rows, other.context, other.layers)
        and (one.kv == other.kv or one.ranks == other.ranks)
    ]


def _unit(step: TimedStep) -> int:
    """Of prompts a time is for each token, of decode for each step."""
    return step.rows * step.context if step.kind == "prefill" else 1


def _per_cached_token(found: Sequence[TimedStep]) -> float:
    """Milliseconds of a layer for each cached token, from runs that differ in the context alone; 0 without any."""
    slopes = [
        (_bf16_ms(one) - _bf16_ms(other)) / one.rows / (one.context - other.context)
        for one, other in itertools.product(found, found)
        if one.rows == other.rows and one.context > other.context
    ]
    return statistics.mean(slopes) if slopes else 0.0


def _means(points: Iterator[Point]) -> list[Point]:
    """Ascending, one of each x."""
    ordered = itertools.groupby(sorted(points), key=lambda point: point[0])
    return [(x, statistics.mean(y for _, y in group)) for x, group in ordered]


def _on(line: Sequence[Point], x: float) -> float:
    """Between two points of `line`, which has `x` within it."""
    (x0, y0), (x1, y1) = next((pair for pair in itertools.pairwise(line) if x <= pair[1][0]), (line[0], line[0]))
    return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
