"""A policy is a function that scores candidates; the lowest score wins, and equal scores take turns.

    score(candidates, inputs) -> one tuple for each candidate, compared element by element

It is pure: the same inputs give the same scores, so a decision can be explained later by scoring again. Randomised
policies take their randomness from the request's `draw`. docs/explanation/placement.md has what each policy is for.

Besides the policy, `far` leaves out decode workers that are not among the nearest with room.
"""

import bisect
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from millrace_router.config import Policy, Routing
from millrace_router.policy.holders import Process
from millrace_router.policy.prefix_fetches import PrefixSources, saved
from millrace_router.policy.snapshot import Key, PlacementRequest, Replica

Score = tuple[float, ...]
NOT_DRAWN: Score = (float("inf"), 0.0)
KEY = attrgetter("key")
_U64 = 2**64 - 1
LOAD_SLACK = 4  # so many sequences are never too many


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a policy besides the candidates."""

    want: PlacementRequest
    routing: Routing
    everyone: tuple[Replica, ...]  # of the role, in order of key, whether they are candidates or not
    pages: Mapping[Process, float]  # full pages of the prompt that a replica has cached
    last: Key | None  # the replica of the role's previous request
    prefix_sources: PrefixSources = ()

    def cached(self, replica: Replica) -> int:
        """Prompt tokens that the replica need not compute, or need not transfer."""
        return self.want.cached(self.pages.get(replica.process, 0))


Scorer = Callable[[Sequence[Replica], Inputs], Sequence[Score]]


def best(candidates: Sequence[Replica], scores: Sequence[Score], last: Key | None) -> int:
    """Index of the lowest score; of equal ones, the first whose key comes after `last`. Candidates ascend by key."""
    lowest = min(scores)
    if last is not None:
        for i in range(bisect.bisect_right(candidates, last, key=KEY), len(candidates)):
            if scores[i] == lowest:
                return i
    return scores.index(lowest)


def bound(candidates: Sequence[Replica], routing: Routing) -> float:
    """Sequences that no candidate should exceed: `load_factor` x the mean, with one more sequence counted in, but never
    less than LOAD_SLACK. At least one candidate is always below it.
    """
    total = sum(replica.sequences for replica in candidates) + 1
    return max(-(-routing.load_factor * total // len(candidates)), LOAD_SLACK)


def distances(source: Replica, candidates: Sequence[Replica], levels: Sequence[str]) -> list[int]:
    """0: all labels are equal; n: the first of the last n levels differs. A label that both lack is equal."""
    away = [(source.labels.get(label), label, len(levels) - i) for i, label in enumerate(levels)]
    found = []
    for replica in candidates:
        labels = replica.labels
        for own, label, far_away in away:
            if labels.get(label) != own:
                found.append(far_away)
                break
        else:
            found.append(0)
    return found


def far(source: Replica, candidates: Sequence[Replica], routing: Routing) -> list[int]:
    """Indices of the candidates that must not be chosen."""
    away = distances(source, candidates, routing.topology)
    if min(away) == max(away):
        return []
    limit = bound(candidates, routing)
    roomy = [replica.sequences < limit for replica in candidates]
    closest = min(d for d, has_room in zip(away, roomy, strict=True) if has_room)
    return [i for i, d in enumerate(away) if d != closest or not roomy[i]]


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


def cached(candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
    """(tokens of work there + cache_weight x prompt tokens that are not cached there, sequences). A worker with the
    prefix is left for an idle one exactly when its queue costs more than the prefix saves. A replica that could fetch
    the prefix is scored with what it will have, at the price of the fetch.
    """
    want, weight = inputs.want, inputs.routing.cache_weight
    rows = zip(candidates, spared(candidates, inputs), strict=True)
    return [(r.tokens + r.held + weight * (want.tokens - s), float(r.sequences)) for r, s in rows]


def spared(candidates: Sequence[Replica], inputs: Inputs) -> Sequence[float]:
    """Prompt tokens that each candidate need not compute, a prefix that it could fetch at the price of the fetch."""
    want, pages = inputs.want, inputs.pages
    own = [want.cached(pages[process]) if (process := r.process) in pages else 0 for r in candidates]
    return saved(candidates, own, want, inputs.prefix_sources)


def session(candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
    """(0, or 1 above the bound; minus the weight). A request without session goes to the least loaded. Rendezvous
    hashing: each replica has a pseudo-random weight for each session, so all routers agree without communication.
    """
    if not inputs.want.session:
        return least_loaded(candidates, inputs)
    limit = bound(candidates, inputs.routing)
    name = _hash(inputs.want.session)
    return [(float(replica.sequences >= limit), -_weight(name, replica.key)) for replica in candidates]


def length_buckets(candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
    """(buckets away, tokens of work, sequences). A worker without a valid label comes last for every bucket."""
    bounds, label = inputs.routing.length_bounds, inputs.routing.length_label
    bucket = bisect.bisect_left(bounds, inputs.want.tokens)
    groups: Mapping[Key, float]
    if label:
        valid = {str(number): float(number) for number in range(len(bounds) + 1)}
        groups = {replica.key: valid.get(replica.labels.get(label, ""), float("inf")) for replica in candidates}
    else:
        everyone = inputs.everyone
        groups = {replica.key: i * (len(bounds) + 1) // len(everyone) for i, replica in enumerate(everyone)}
    return [(abs(groups[r.key] - bucket), r.load, r.sequences) for r in candidates]


SCORERS: Mapping[Policy, Scorer] = {
    Policy.ROUND_ROBIN: round_robin,
    Policy.RANDOM: random_choice,
    Policy.POWER_OF_TWO: power_of_two,
    Policy.LEAST_LOADED: least_loaded,
    Policy.SESSION: session,
    Policy.PREFIX_AWARE: cached,
    Policy.KV_AWARE: cached,
    Policy.LENGTH_BUCKETS: length_buckets,
}


def _weight(session: int, key: Key) -> int:
    """u64 of a session and a replica, by the finaliser of splitmix64."""
    x = session ^ _key_hash(key)
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _U64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _U64
    return x ^ x >> 31


@functools.lru_cache(maxsize=4096)
def _key_hash(key: Key) -> int:
    return _hash(f"{key[0]}/{key[1]}")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
