"""The choice of the workers for a request: a pure function of a `Situation`.

1. local prefill   a decode worker runs the prompt itself: its uncached part is short (`local_prefill_tokens`), or it
                   would wait for too long at every prefill worker (`local_prefill_wait`)
2. pair            a prefill replica with an open decode partner; then, near it, a decode replica that has been warmed
                   with it and has an equal KV layout. One token to go: the prefill replica alone. Where another
                   replica has more of the prompt cached, the prefill replica may fetch it (prefix_fetches.py)
3. unified         one replica for both phases

The first of these with a replica that has capacity is taken; within it the role's policy scores the candidates
(scoring.py). Workers in `PlacementRequest.avoid` are candidates only when no other is left, ejected ones (resilience/)
not even then. While the view names a revision that is asked first, the others get what it has no room for.

A `Decision` costs nothing when it is made: it keeps the immutable situation, and because choosing is a pure function,
choosing once more with notes explains it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from millrace.v1.admin_pb2 import Candidate, Selection

from millrace_router.config import Policy, Routing
from millrace_router.policy.holders import Process
from millrace_router.policy.prefix_fetches import START_TOKENS_PER_S, PrefixSources, best_prefix_fetch, prefix_sources
from millrace_router.policy.scoring import SCORERS, Inputs, best, far
from millrace_router.policy.snapshot import Key, Placement, PlacementRequest, PrefixFetch, Replica, View

CLOSED = "no capacity"
TOO_SMALL = "its context is too small"
NO_PAGES: Mapping[Process, int] = {}
Note = Callable[[Selection], None]  # each question to a policy; a request asks one or several


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that a choice depends on, besides the configuration."""

    view: View
    want: PlacementRequest
    last: Mapping[str, Key] = field(default_factory=dict)  # by role: the replica of its previous request
    prefill_pages: Mapping[Process, float] = field(default_factory=lambda: NO_PAGES)  # leading pages that are cached
    decode_pages: Mapping[Process, float] = field(default_factory=lambda: NO_PAGES)  # of decode and unified replicas
    fetchable: Mapping[Process, int] = field(default_factory=lambda: NO_PAGES)  # on any replica's device


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
    def route(self) -> str:
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
        cached = situation.want.cached(pages.get(replica.process, 0))
        return cached if self.prefix_fetch is None else max(cached, situation.want.cached(self.prefix_fetch.num_pages))

    @property
    def prefix_fetch(self) -> PrefixFetch | None:
        """The pages that the prefill worker fetches."""
        prefix_fetch = self.placement.prefix_fetch
        return prefix_fetch if prefix_fetch is not None and prefix_fetch.worthwhile else None

    def explain(self) -> tuple[Selection, ...]:
        notes: list[Selection] = []
        self.chooser.place(self.situation, notes.append)
        return tuple(notes)

    def attributes(self) -> dict[str, str | int]:
        """Attributes of a span of the request's trace."""
        prefill, decode, chooser = self.placement.prefill, self.placement.decode, self.chooser
        found: dict[str, str | int] = {
            "millrace.route.kind": self.route,
            "millrace.route.cached_tokens": self.cached_tokens,
        }
        for role, policy, replica in (
            ("prefill", chooser.prefill, prefill),
            ("worker" if prefill is None else "decode", chooser.decode, decode),
        ):
            if replica is not None:
                found[f"millrace.route.{role}"] = f"{replica.address}/{replica.index}"
                found[f"millrace.route.{role}_policy"] = str(policy)
        if self.prefix_fetch is not None:
            found["millrace.route.prefix_source"] = (
                f"{self.prefix_fetch.source.address}/{self.prefix_fetch.source.index}"
            )
            found["millrace.route.prefix_pages"] = self.prefix_fetch.num_pages
        return found


@dataclass(frozen=True, slots=True)
class _Attempt:
    chooser: Chooser
    situation: Situation
    avoid: frozenset[str]
    revision: str | None  # the only one that is asked; None: all are
    note: Note | None

    def local(self) -> Placement | None:
        want, routing = self.situation.want, self.chooser.routing
        if want.prefill_only or not routing.local_prefill:
            return None
        pages, replicas = self.situation.decode_pages, self.situation.view.decode
        limit = max(routing.local_prefill_tokens, self._tokens_ahead() if routing.local_prefill_wait else 0)

        def too_long(replica: Replica) -> str:
            """The replica's waiting tokens count: a decode worker that is busy with prompts gets no more of them."""
            uncached = want.uncached(pages.get(replica.process, 0))
            return "prompt too long" if uncached + replica.tokens >= limit else ""

        excluded = [self._unable(replica) or too_long(replica) for replica in replicas]
        worker = self._select("local", replicas, excluded)
        return None if worker is None else Placement(None, worker)

    def _tokens_ahead(self) -> float:
        """Tokens until the prompt is done at the prefill replica where that is soonest, its own included: a decode
        replica with fewer is sooner done. 0: it need not wait long there, or there is no prefill replica.
        """
        want, pages = self.situation.want, self.situation.prefill_pages
        replicas = [r for r in self.situation.view.prefill if self.revision in (None, r.revision)]
        limit_s, least = self.chooser.routing.local_prefill_wait, math.inf if replicas else 0.0
        for replica in replicas:
            if not self._closed(replica):
                if replica.tokens <= limit_s * (replica.prompt_tokens_per_s or START_TOKENS_PER_S):
                    return 0.0
                least = min(least, replica.tokens + want.uncached(pages.get(replica.process, 0)))
        return least

    def pair(self) -> Placement | None:
        view, want = self.situation.view, self.situation.want
        closed = [] if want.prefill_only else [self._unable(replica) for replica in view.decode]
        decodes = [replica for replica, why in zip(view.decode, closed, strict=False) if not why]

        def alone(replica: Replica) -> bool:
            return not (want.prefill_only or _has_partner(replica, decodes))

        no_partner = "no open decode worker is paired with it"
        excluded = [self._unable_to_prefill(r) or (no_partner if alone(r) else "") for r in view.prefill]
        offers = prefix_sources((*view.decode, *view.unified, *view.prefill), self.situation.fetchable, want)
        source = self._select("prefill", view.prefill, excluded, offers=offers)
        if source is None:
            return None
        own = max(pages.get(source.process, 0) for pages in (self.situation.prefill_pages, self.situation.fetchable))
        prefix_fetch = best_prefix_fetch(source, want.cached(own), want, offers)
        if want.prefill_only:
            return Placement(source, None, prefix_fetch)
        rows = zip(view.decode, closed, strict=True)
        excluded = [why or ("" if _paired(source, r) else "not paired with the prefill worker") for r, why in rows]
        target = self._select("decode", view.decode, excluded, near=source)
        assert target is not None
        return Placement(source, target, prefix_fetch)

    def unified(self) -> Placement | None:
        replicas = self.situation.view.unified
        worker = self._select("unified", replicas, [self._unable(replica) for replica in replicas])
        return None if worker is None else Placement(None, worker)

    def _closed(self, replica: Replica) -> str:
        if replica.capacity <= 0:
            return CLOSED
        if replica.ejected:
            return replica.ejected
        if self.revision is not None and replica.revision != self.revision:
            return f"revision {self.revision!r} is asked first"
        if replica.address == self.situation.want.kept:
            return "kept for an earlier request"
        return "failed this request before" if replica.address in self.avoid else ""

    def _unable_to_prefill(self, replica: Replica) -> str:
        if self.situation.want.tokens >= replica.context:
            return TOO_SMALL
        return self._closed(replica) or ("" if replica.room > 0 else "long queue")

    def _unable(self, replica: Replica) -> str:
        """Why a worker that would generate the output gets no request, or not this one."""
        want = self.situation.want
        if want.tokens + want.outputs > replica.context:
            return TOO_SMALL
        if closed := self._closed(replica):
            return closed
        room = replica.room - min(want.outputs - 1, replica.expected_output)  # the last token is never fed back
        if want.tokens <= room or want.uncached(self.situation.decode_pages.get(replica.process, 0)) <= room:
            return ""
        return "no room for its KV"

    def _select(
        self,
        role: str,
        everyone: tuple[Replica, ...],
        excluded: list[str],
        near: Replica | None = None,
        offers: PrefixSources = (),
    ) -> Replica | None:
        """Return the policy's choice among the candidates that are not excluded, for a reason."""
        routing, situation = self.chooser.routing, self.situation
        policy = self.chooser.prefill if role == "prefill" else self.chooser.decode
        pages = situation.prefill_pages if role == "prefill" else situation.decode_pages
        if near is not None and near.labels:
            within = [i for i, why in enumerate(excluded) if not why]
            for i in far(near, [everyone[i] for i in within], routing):
                excluded[within[i]] = "a nearer worker has room"
        candidates = [replica for replica, why in zip(everyone, excluded, strict=True) if not why]
        inputs = Inputs(situation.want, routing, everyone, pages, situation.last.get(role), offers)
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
