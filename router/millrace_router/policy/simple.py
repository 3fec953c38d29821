"""Policies that look at the load at most.

The randomness of `random_choice` and `power_of_two` is the request's `draw`, so they are as repeatable as the others.
`power_of_two` is nearly as even as the least loaded of all, but routers with the same reports do not all choose the
same worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace_router.policy.scoring import Inputs, Score
from millrace_router.policy.snapshot import Replica

NOT_DRAWN: Score = (float("inf"), 0.0)


def least_loaded(candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
    """(tokens of work, sequences): ten short prompts may be less than one long one."""
    return [(replica.load, replica.sequences) for replica in candidates]


def round_robin(candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
    """Equal for all: turns decide, whatever the load. For tests and for requests that are all alike."""
    return [(0.0,)] * len(candidates)


def random_choice(candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
    scores = [NOT_DRAWN] * len(candidates)
    scores[inputs.want.draw % len(candidates)] = (0.0, 0.0)
    return scores


def power_of_two(candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
    """(tokens of work, sequences) of two different candidates."""
    scores = [NOT_DRAWN] * len(candidates)
    high, low = divmod(inputs.want.draw, 2**32)
    first = low % len(candidates)
    second = (first + 1 + high % max(len(candidates) - 1, 1)) % len(candidates)
    for i in (first, second):
        scores[i] = (candidates[i].load, candidates[i].sequences)
    return scores
