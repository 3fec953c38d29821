"""The policies: functions that score candidates (scoring.py).

- `round_robin` looks at nothing, `random_choice` and `power_of_two` draw from the request's `draw`, so they are as
  repeatable as the others. `power_of_two` is nearly as even as `least_loaded`, but routers with the same reports do not
  all choose the same worker.
- `cached` (prefix-aware, KV-aware): the least work including this prompt's own. Both terms of its cost are tokens, so a
  worker with the prefix is left for an idle one exactly when its queue costs more than the prefix saves. The two
  policies differ in their source: prefix_index.py records the prompts that this router sent to each worker, kv_index.py
  gets reports from the workers.
- `session`: a consistent hash with bounded load. Requests of one session go to one replica as long as it is not much
  busier than the others. Rendezvous hashing: every replica has a pseudo-random weight for every session, and the
  heaviest wins. A replica that joins takes only the sessions that it wins, one that leaves gives away only its own, and
  all routers agree without talking to each other. A replica that would exceed the bound (`load_factor` x the mean of
  sequences) is passed over; the session goes to its next heaviest one and comes back later.
- `length_buckets`: short prompts do not wait behind long ones. `length_bounds` (a, b, …) make bucket 0 up to a tokens,
  bucket 1 up to b, …. Replica groups: by the worker's label `length_label`, whose value is the bucket's number; without
  that, the role's replicas in order of key are cut into as many groups of (nearly) equal size. A prompt whose group has
  no room goes to the nearest group.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Mapping, Sequence

from millrace_router.config import Policy
from millrace_router.policy.scoring import Inputs, Score, Scorer, bound
from millrace_router.policy.snapshot import Key, Replica

NOT_DRAWN: Score = (float("inf"), 0.0)
_U64 = 2**64 - 1


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
    """(tokens of work there + cache_weight x prompt tokens that are not cached there, sequences)"""
    weight, tokens = inputs.routing.cache_weight, inputs.want.tokens
    return [
        (replica.load + weight * (tokens - inputs.cached(replica)), float(replica.sequences)) for replica in candidates
    ]


def session(candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
    """(0, or 1 above the bound; minus the weight). A request without session goes to the least loaded."""
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
