"""Three nested states of a worker, and the values derived from them. Pure.

    discovered   a source of discovery lists it
    healthy      its process answers, reports READY and has our Link
    routable     healthy, not withheld (by discovery or an operator), and the hooks are done for a pair with such a
                 partner; a unified worker is its own partner, and so is a flexible one, which has others besides

Everything is derived from current facts, so a loss is noticed like a gain.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from millrace_router.fleet.worker import Worker

ROLES = ("prefill", "decode", "unified", "flexible", "unspecified")
DISCOVERED, HEALTHY, ROUTABLE = STATES = ("discovered", "healthy", "routable")


@dataclass(frozen=True, slots=True)
class Pair:
    """Epochs. A unified or flexible worker is a pair of itself with an empty source."""

    source: str
    worker: str


def routable(workers: Iterable[Worker], ready: Iterable[Pair]) -> frozenset[str]:
    """Epochs. `ready` are the pairs whose hooks are done."""
    fit = {worker.epoch for worker in workers if not worker.unhealthy and not worker.withheld}
    found: set[str] = set()
    for pair in ready:
        if pair.worker in fit and (not pair.source or pair.source in fit):
            found.update((pair.source, pair.worker))
    return frozenset(found - {""})


def sources(ready: Iterable[Pair]) -> dict[str, frozenset[str]]:
    """Epoch of a worker → epochs of those that it has been warmed with."""
    found: dict[str, set[str]] = {}
    for pair in ready:
        found.setdefault(pair.worker, set()).add(pair.source)
    return {worker: frozenset(epochs) for worker, epochs in found.items()}


def longest(workers: Iterable[Worker], sources: dict[str, frozenset[str]]) -> int:
    """Tokens of the longest request, prompt and output, that one of these workers can run, with a source that is among
    them if it needs one; 0: none can.
    """
    contexts = {worker.epoch: worker.info.max_context for worker in workers}
    pairs = ((epoch, source or epoch) for epoch in contexts for source in sources.get(epoch, ()))
    return max((min(contexts[epoch], contexts.get(source, 0)) for epoch, source in pairs), default=0)


def count(workers: Iterable[Worker], routable: frozenset[str]) -> Counter[tuple[str, str]]:
    """Count workers by (role, state); a worker in an inner state is in the outer ones too."""
    counts: Counter[tuple[str, str]] = Counter()
    for worker in workers:
        counts[worker.role_name, DISCOVERED] += 1
        counts[worker.role_name, HEALTHY] += not worker.unhealthy
        counts[worker.role_name, ROUTABLE] += worker.epoch in routable
    return counts
