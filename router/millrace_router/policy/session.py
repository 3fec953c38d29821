"""Session affinity: a consistent hash with bounded load. Requests of one session go to one replica as long as it is
not much busier than the others.

Rendezvous hashing: every replica has a pseudo-random weight for every session, and the heaviest wins. A replica that
joins takes only the sessions that it wins, one that leaves gives away only its own, and all routers agree without
talking to each other. A replica that would exceed the bound (`load_factor` x the mean of sequences) is passed over;
the session goes to its next heaviest one and comes back later.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

from millrace_router.policy.scoring import Inputs, Score, bound
from millrace_router.policy.simple import least_loaded
from millrace_router.policy.snapshot import Key, Replica

_U64 = 2**64 - 1


def score(candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
    """(0, or 1 above the bound; minus the weight). A request without session goes to the least loaded."""
    if not inputs.want.session:
        return least_loaded(candidates, inputs)
    limit = bound(candidates, inputs.routing)
    session = _hash(inputs.want.session)
    return [(float(replica.sequences >= limit), -weight(session, replica.key)) for replica in candidates]


def weight(session: int, key: Key) -> int:
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
