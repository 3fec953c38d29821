"""A policy is a function that scores candidates; the lowest score wins, and equal scores take turns.

    score(candidates, inputs) -> one tuple for each candidate, compared element by element

It is pure: the same inputs give the same scores, so a decision can be explained later by scoring again.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from millrace_router.config import Routing
from millrace_router.policy.snapshot import Key, Replica, Want

Score = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a policy besides the candidates."""

    want: Want
    routing: Routing
    everyone: tuple[Replica, ...]  # of the role, in order of key, whether they are candidates or not
    pages: Mapping[tuple[str, int], int]  # full pages of the prompt that a replica (by `process`) has cached
    last: Key | None  # the replica of the role's previous request

    def cached(self, replica: Replica) -> int:
        """Prompt tokens that the replica need not compute, or need not transfer."""
        return self.want.cached(self.pages.get(replica.process, 0))


Scorer = Callable[[Sequence[Replica], Inputs], Sequence[Score]]


def best(candidates: Sequence[Replica], scores: Sequence[Score], last: Key | None) -> int:
    """Index of the lowest score; of equal ones, the first whose key comes after `last`. Candidates ascend by key."""
    lowest = min(scores)
    if last is not None:
        for i in range(bisect.bisect_right(candidates, last, key=_key), len(candidates)):
            if scores[i] == lowest:
                return i
    return scores.index(lowest)


def bound(candidates: Sequence[Replica], routing: Routing) -> float:
    """Sequences that no candidate should exceed: `load_factor` x the mean, with one more sequence counted in, but never
    less than `load_slack`. At least one candidate is always below it.
    """
    total = sum(replica.sequences for replica in candidates) + 1
    return max(-(-routing.load_factor * total // len(candidates)), routing.load_slack)


def _key(replica: Replica) -> Key:
    return replica.key
