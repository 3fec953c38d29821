"""Prefix-aware and KV-aware: the least work including this prompt's own.

    cost = tokens of work there + cache_weight x prompt tokens that are not cached there

Both terms are tokens, so a worker with the prefix is left for an idle one exactly when its queue costs more than the
prefix saves. The two policies differ in their source: prefix_index.py records the prompts that this router sent to each
worker, kv_index.py gets reports from the workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace_router.policy.scoring import Inputs, Score
from millrace_router.policy.snapshot import Replica


def score(candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
    """(cost, sequences)"""
    weight, tokens = inputs.routing.cache_weight, inputs.want.tokens
    return [
        (replica.load + weight * (tokens - inputs.cached(replica)), float(replica.sequences)) for replica in candidates
    ]
