"""Which workers serve a request: pure functions over immutable snapshots.

A request needs a prefill and a decode replica with equal KV layout that have been warmed as a pair, or one unified
replica. Pairs come first. Workers in `Want.avoid` (they failed this request before) are chosen only when nobody else
is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millrace_router.config import Policy


@dataclass(frozen=True, slots=True)
class Replica:
    """One attention-data-parallel unit of a routable worker, as the router sees it now.

    `credits`, `tokens` and `sequences` include what this router has sent since the worker's last report.
    """

    address: str
    index: int
    epoch: str
    fingerprint: str
    credits: int  # further requests it takes
    tokens: int  # prompt tokens waiting to be computed
    sequences: int  # running, waiting and importing
    sources: frozenset[str] = frozenset()  # decode: epochs of the prefill workers it has been warmed with

    @property
    def key(self) -> tuple[str, int]:
        return self.address, self.index


@dataclass(frozen=True, slots=True)
class View:
    """All routable replicas by role."""

    prefill: tuple[Replica, ...] = ()
    decode: tuple[Replica, ...] = ()
    unified: tuple[Replica, ...] = ()


@dataclass(frozen=True, slots=True)
class Want:
    tokens: int  # length of the prompt, replayed outputs included
    prefill_only: bool = False  # one more token ends it: nothing to hand over
    avoid: frozenset[str] = frozenset()  # addresses


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Replica
    decode: Replica | None  # None: prefill only


@dataclass(frozen=True, slots=True)
class Unified:
    worker: Replica


Placement = Pair | Unified


@dataclass(frozen=True, slots=True)
class Chooser:
    """A policy per role. `last` is the replica that the role's previous request got, for round robin."""

    prefill: Policy
    decode: Policy

    def choose(self, view: View, want: Want, last: dict[str, tuple[str, int]]) -> Placement | None:
        """The placement, or None when the request has to wait."""
        preferred = _without(view, want.avoid)
        return self._choose(preferred, want, last) or (self._choose(view, want, last) if want.avoid else None)

    def _choose(self, view: View, want: Want, last: dict[str, tuple[str, int]]) -> Placement | None:
        decodes = _open(view.decode)
        prefills = [p for p in _open(view.prefill) if want.prefill_only or any(_paired(p, d) for d in decodes)]
        if prefills:
            p = pick(self.prefill, prefills, last.get("prefill"))
            if want.prefill_only:
                return Pair(p, None)
            return Pair(p, pick(self.decode, [d for d in decodes if _paired(p, d)], last.get("decode")))
        unified = _open(view.unified)
        return Unified(pick(self.decode, unified, last.get("unified"))) if unified else None


def pick(policy: Policy, candidates: Sequence[Replica], last: tuple[str, int] | None) -> Replica:
    """Round robin: the next key after `last`. Least loaded: fewest waiting tokens, then sequences, then next key."""
    ordered = sorted(candidates, key=lambda replica: replica.key)
    if last is not None:
        ordered = [r for r in ordered if r.key > last] + [r for r in ordered if r.key <= last]
    if policy is Policy.ROUND_ROBIN:
        return ordered[0]
    return min(ordered, key=lambda replica: (replica.tokens, replica.sequences))


def _open(replicas: Iterable[Replica]) -> list[Replica]:
    return [replica for replica in replicas if replica.credits > 0]


def _paired(prefill: Replica, decode: Replica) -> bool:
    return prefill.epoch in decode.sources and prefill.fingerprint == decode.fingerprint


def _without(view: View, avoid: frozenset[str]) -> View:
    if not avoid:
        return view
    return View(
        *(tuple(r for r in role if r.address not in avoid) for role in (view.prefill, view.decode, view.unified))
    )
