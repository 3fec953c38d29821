"""Pages travel from the prefill worker to the decode worker: near is better than far.

Labels are compared from the widest (zone) to the narrowest (host). The nearest group with a replica within the load
bound is taken, so nearness never costs more than `load_factor` x the mean load.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace_router.config import Routing
from millrace_router.policy.scoring import bound
from millrace_router.policy.snapshot import Replica


def distance(a: Replica, b: Replica, levels: Sequence[str]) -> int:
    """0: all labels are equal; n: the first of the last n levels differs. A label that both lack is equal."""
    for i, label in enumerate(levels):
        if a.labels.get(label) != b.labels.get(label):
            return len(levels) - i
    return 0


def far(source: Replica, candidates: Sequence[Replica], routing: Routing) -> list[int]:
    """Indices of the candidates that must not be chosen."""
    distances = [distance(source, replica, routing.topology) for replica in candidates]
    if min(distances) == max(distances):
        return []
    limit = bound(candidates, routing)
    roomy = [replica.sequences < limit for replica in candidates]
    closest = min(d for d, has_room in zip(distances, roomy, strict=True) if has_room)
    return [i for i, d in enumerate(distances) if d != closest or not roomy[i]]
