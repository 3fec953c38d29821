"""All replicas in turn, whatever the load: for tests and for requests that are all alike."""

from __future__ import annotations

from collections.abc import Sequence

from millrace_router.policy.scoring import Inputs, Score
from millrace_router.policy.snapshot import Replica


def score(candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
    """Equal for all: turns decide."""
    return [(0.0,)] * len(candidates)
