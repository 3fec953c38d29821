"""The choice of the workers for a request: a pure function of a `Situation`.

1. local prefill   the uncached part of the prompt is short: a decode worker runs it itself (`local_prefill_tokens`)
2. pair            a prefill replica with an open decode partner; then, near it, a decode replica that has been warmed
                   with it and has an equal KV layout. One token to go: the prefill replica alone
3. unified         one replica for both phases

The first of these with a replica that has credits is taken. Workers in `Want.avoid` (they failed this request before)
are candidates only when no other is left; ejected ones (resilience/) not even then. While the view names a revision
that is asked first, the others get the requests for which it has no room. Within a step the role's policy scores the
candidates, see scoring.py.

A `Decision` costs nothing when it is made: it keeps the immutable situation, and because choosing is a pure function,
choosing once more with notes explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from millrace.v1.admin_pb2 import Candidate, Selection

from millrace_router.config import Policy, Routing
from millrace_router.policy.holders import Process
from millrace_router.policy.scoring import SCORERS, Inputs, best, far
from millrace_router.policy.snapshot import Key, Placement, Replica, View, Want

CLOSED = "no credits"
NO_PAGES: Mapping[Process, int] = {}
WhyNot = Callable[[Replica], str]
Note = Callable[[Selection], None]  # each question to a policy; a request asks one or several


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that a choice depends on, besides the configuration."""

    view: View
    want: Want
    last: Mapping[str, Key] = field(default_factory=dict)  # by role: the replica of its previous request
    prefill_pages: Mapping[Process, int] = field(default_factory=lambda: NO_PAGES)  # leading pages that are cached
    decode_pages: Mapping[Process, int] = field(default_factory=lambda: NO_PAGES)  # of decode and unified replicas


@dataclass(frozen=True, slots=True)
class Chooser:
    """A policy per role; unified workers are chosen like decode workers."""

    prefill: Policy
    decode: Policy
    routing: Routing

    def choose(self, situation: Situation) -> Decision | None:
        """None: the request has to wait."""
        placement = self.place(situation)
        return None if placement is None else Decision(self, situation, placement)

    def place(self, situation: Situation, note: Note | None = None) -> Placement | None:
        """`note` gets every selection on the way, in order, the failed ones included."""
        want, first = situation.want, situation.view.first
        revisions = (None,) if first is None else (first, None)
        for avoid in (want.avoid, frozenset[str]()) if want.avoid else (want.avoid,):
            for revision in revisions:
                attempt = _Attempt(self, situation, avoid, revision, note)
                placement = attempt.local() or attempt.pair() or attempt.unified()
                if placement is not None:
                    return placement
        return None


@dataclass(frozen=True, slots=True)
class Decision:
    chooser: Chooser
    situation: Situation
    placement: Placement

    @property
    def way(self) -> str:
        """One of "pair", "prefill_only", "local" and "unified"."""
        if self.placement.prefill is not None:
            return "prefill_only" if self.placement.decode is None else "pair"
        return "unified" if self.placement.decode in self.situation.view.unified else "local"

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the replica which computes the prompt is expected to have."""
        situation, prefill, decode = self.situation, self.placement.prefill, self.placement.decode
        replica, pages = (prefill, situation.prefill_pages) if prefill else (decode, situation.decode_pages)
        assert replica is not None
        return situation.want.cached(pages.get(replica.process, 0))

    def explain(self) -> tuple[Selection, ...]:
        notes: list[Selection] = []
        self.chooser.place(self.situation, notes.append)
        return tuple(notes)

    def attributes(self) -> dict[str, str | int]:
        """Attributes of a span of the request's trace."""
        prefill, decode, chooser = self.placement.prefill, self.placement.decode, self.chooser
        found: dict[str, str | int] = {
            "millrace.route.way": self.way,
            "millrace.route.cached_tokens": self.cached_tokens,
        }
        for role, policy, replica in (
            ("prefill", chooser.prefill, prefill),
            ("worker" if prefill is None else "decode", chooser.decode, decode),
        ):
            if replica is not None:
                found[f"millrace.route.{role}"] = f"{replica.address}/{replica.index}"
                found[f"millrace.route.{role}_policy"] = str(policy)
        return found


@dataclass(frozen=True, slots=True)
class _Attempt:
    chooser: Chooser
    situation: Situation
    avoid: frozenset[str]
    revision: str | None  # the only one that is asked; None: all are
    note: Note | None

    def local(self) -> Placement | None:
        want, limit = self.situation.want, self.chooser.routing.local_prefill_tokens
        if not limit or want.prefill_only:
            return None
        pages = self.situation.decode_pages

        def why_not(replica: Replica) -> str:
            """Return why a prompt is not run by a decode worker. Its waiting tokens count: a decode worker that is busy
            with prompts gets no more of them.
            """
            uncached = want.tokens - want.cached(pages.get(replica.process, 0))
            return self._closed(replica) or ("prompt too long" if uncached + replica.tokens >= limit else "")

        worker = self._select("local", self.situation.view.decode, why_not)
        return None if worker is None else Placement(None, worker)

    def pair(self) -> Placement | None:
        view, prefill_only = self.situation.view, self.situation.want.prefill_only
        decodes = [] if prefill_only else [replica for replica in view.decode if not self._closed(replica)]

        def why_not(replica: Replica) -> str:
            if why := self._closed(replica):
                return why
            return "" if prefill_only or _has_partner(replica, decodes) else "no open decode worker is paired with it"

        source = self._select("prefill", view.prefill, why_not)
        if source is None or prefill_only:
            return None if source is None else Placement(source, None)

        def mismatch(replica: Replica) -> str:
            return self._closed(replica) or ("" if _paired(source, replica) else "not paired with the prefill worker")

        target = self._select("decode", view.decode, mismatch, near=source)
        assert target is not None
        return Placement(source, target)

    def unified(self) -> Placement | None:
        worker = self._select("unified", self.situation.view.unified, self._closed)
        return None if worker is None else Placement(None, worker)

    def _closed(self, replica: Replica) -> str:
        if replica.credits <= 0:
            return CLOSED
        if replica.left_out:
            return replica.left_out
        if self.revision is not None and replica.revision != self.revision:
            return f"revision {self.revision!r} is asked first"
        return "failed this request before" if replica.address in self.avoid else ""

    def _select(
        self, role: str, everyone: tuple[Replica, ...], why_not: WhyNot, near: Replica | None = None
    ) -> Replica | None:
        """Return the policy's choice among the candidates that are not excluded."""
        routing, situation = self.chooser.routing, self.situation
        policy = self.chooser.prefill if role == "prefill" else self.chooser.decode
        pages = situation.prefill_pages if role == "prefill" else situation.decode_pages
        excluded = [why_not(replica) for replica in everyone]
        if near is not None and near.labels:
            within = [i for i, why in enumerate(excluded) if not why]
            for i in far(near, [everyone[i] for i in within], routing):
                excluded[within[i]] = "a nearer worker has room"
        candidates = [replica for replica, why in zip(everyone, excluded, strict=True) if not why]
        inputs = Inputs(situation.want, routing, everyone, pages, situation.last.get(role))
        scores = SCORERS[policy](candidates, inputs) if candidates else []
        chosen = candidates[best(candidates, scores, inputs.last)] if candidates else None
        if self.note is not None and everyone:
            scored = iter(scores)
            rows = [
                Candidate(
                    address=r.address,
                    replica=r.index,
                    chosen=r is chosen,
                    excluded=why,
                    score=() if why else next(scored),
                    cached_tokens=inputs.cached(r),
                )
                for r, why in zip(everyone, excluded, strict=True)
            ]
            self.note(Selection(role=role, policy=policy, candidates=rows))
        return chosen


def _has_partner(source: Replica, decodes: Sequence[Replica]) -> bool:
    for decode in decodes:  # noqa: SIM110 - a generator costs more than all the comparisons: the first one nearly always fits
        if _paired(source, decode):
            return True
    return False


def _paired(source: Replica, decode: Replica) -> bool:
    return source.epoch in decode.sources and source.fingerprint == decode.fingerprint
