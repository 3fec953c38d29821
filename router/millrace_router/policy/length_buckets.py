"""Length buckets: short prompts do not wait behind long ones.

`length_bounds` (a, b, …) make buckets 0: up to a tokens, 1: up to b, …. Replica groups: by the worker's label
`length_label`, whose value is the bucket's number; without that, the role's replicas in order of key are cut into as
many groups of (nearly) equal size. A prompt whose group has no room goes to the nearest group.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from millrace_router.policy.scoring import Inputs, Score
from millrace_router.policy.snapshot import Replica


def score(candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
    """(buckets away, tokens of work, sequences)"""
    bucket = bisect.bisect_left(inputs.routing.length_bounds, inputs.want.tokens)
    groups = _by_label(candidates, inputs) if inputs.routing.length_label else _by_rank(inputs.everyone, inputs)
    return [(abs(groups[r.key] - bucket), r.load, r.sequences) for r in candidates]


def _by_rank(everyone: Sequence[Replica], inputs: Inputs) -> dict[tuple[str, int], float]:
    buckets = len(inputs.routing.length_bounds) + 1
    return {replica.key: i * buckets // len(everyone) for i, replica in enumerate(everyone)}


def _by_label(candidates: Sequence[Replica], inputs: Inputs) -> dict[tuple[str, int], float]:
    """A worker without a valid label comes last for every bucket."""
    names = {str(bucket): float(bucket) for bucket in range(len(inputs.routing.length_bounds) + 1)}
    label = inputs.routing.length_label
    return {replica.key: names.get(replica.labels.get(label, ""), float("inf")) for replica in candidates}
