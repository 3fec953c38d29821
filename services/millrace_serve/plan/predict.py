"""Predicted times of a step, between the measured ones.

    decode    a straight line in the number of sequences, plus a time for each cached token of all sequences
    prefill   for each token, a straight line in the length of a prompt

They are scaled by layers, by the type of KV and by what ranks send each other, each as pairs of runs say: of this GPU,
or where it has none of others. Outside of what was measured there is no prediction.
"""

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
    """The steps to interpolate in: of a rank alone, and of ranks together."""
    return [step for step in steps() if (step.gpu, step.shape, step.kind) == (ranks.gpu, ranks.shape, kind)]


def _prediction(ranks: StepRanks, found: Sequence[TimedStep], ms: float, rows: int) -> Prediction:
    """`ms`: of a layer of a rank alone, with KV in BF16."""
    files, scaled = {step.ms_at for step in found}, []
    if ranks.num_ranks > 1:
        ms += _exchange_ms(found[0], rows)
        files |= {one.ms_at for one, _ in _pairs(found[0], lambda step: step.ranks > 1)}
    most = max(step.ranks for step in steps() if (step.kind, step.shape) == (found[0].kind, ranks.shape))
    if ranks.num_ranks > most:
        scaled.append(f"{ranks.num_ranks} ranks exchange as {most}" if most > 1 else "without sums over ranks")
    if ranks.fp8_kv and (pairs := _pairs(found[0], lambda step: step.kv == FP8)):
        ms *= _kv_factor(found[0])
        files |= {one.ms_at for one, _ in pairs}
    if {step.layers for step in found} != {ranks.layers}:
        scaled.append("by layers")
    return Prediction(ms * ranks.layers, tuple(sorted({at.partition(":")[0] + ".json" for at in files})), tuple(scaled))


def _bf16_ms(step: TimedStep) -> float:
    """Of a layer of a rank alone, with KV in BF16."""
    together = _exchange_ms(step, step.rows) * _unit(step) if step.ranks > 1 else 0.0
    return step.ms / step.layers / (_kv_factor(step) if step.kv == FP8 else 1.0) - together


def _exchange_ms(like: TimedStep, rows: int) -> float:
    """What several ranks add to a layer. Fewer `rows` than were timed send each other less."""
    pairs = _pairs(like, lambda step: step.ranks > 1)
    added = ((one.ms / one.layers - other.ms / other.layers) / _unit(one) for one, other in pairs)
    return statistics.mean(added) * min(rows / min(one.rows for one, _ in pairs), 1) if pairs else 0.0


def _kv_factor(like: TimedStep) -> float:
    """A step with KV in FP8 to one in BF16; 1 where nobody has timed both."""
    pairs = _pairs(like, lambda step: step.kv == FP8)
    return statistics.mean(one.ms / other.ms for one, other in pairs) if pairs else 1.0


def _pairs(like: TimedStep, only: Callable[[TimedStep], bool]) -> list[tuple[TimedStep, TimedStep]]:
    """Steps of one size with `only` and without it, which differ in nothing else that matters."""
    alike = [step for step in steps() if (step.kind, step.shape) == (like.kind, like.shape)]
    found = [
        (one, other)
        for one, other in itertools.product(filter(only, alike), itertools.filterfalse(only, alike))
        if (one.gpu, one.rows, one.context, one.layers) == (other.gpu, other.rows, other.context, other.layers)
        and (one.kv == other.kv or one.ranks == other.ranks)
    ]
    return [pair for pair in found if pair[0].gpu == like.gpu] or found


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
