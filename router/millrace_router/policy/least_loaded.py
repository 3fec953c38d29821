"""The least work, in tokens: ten short prompts may be less than one long one. Sequences decide between equals."""

from __future__ import annotations

from collections.abc import Sequence

from millrace_router.policy.scoring import Inputs, Score
from millrace_router.policy.snapshot import Replica


def score(candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
    """(tokens of work, sequences)"""
    return [(replica.load, replica.sequences) for replica in candidates]
