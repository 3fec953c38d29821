"""The choice of the workers for a request: a pure function of a `Situation`.

1. predicted       for requests with limits, where step times are known: pairs, and every replica that may run both
                   phases, by predicted times (predict.py)
2. pair            a prefill replica with an open decode partner; then, near it, a decode replica that has been warmed
                   with it and has an equal KV layout. One token to go: the prefill replica alone. Where another
                   replica has more of the prompt cached, the prefill replica may fetch it (prefix_fetches.py)
3. unified         one replica for both phases
4. flexible        any flexible worker runs both phases, whatever its duty

The first of these with a replica that has capacity is taken; within it the role's policy scores the candidates
(scoring.py). Workers in `PlacementRequest.avoid` are candidates only when no other is left, those that the view
excludes not even then. While it names a revision that is asked first, the others get what it has no room for.

A `Decision` costs nothing when it is made: it keeps the immutable situation, and because choosing is a pure function,
choosing once more with notes explains it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from millrace.v1.admin_pb2 import Candidate, Selection

from millrace_router.config import Policy, Routing
from millrace_router.policy.holders import Process
from millrace_router.policy.predict import HANDOVER_S, Predictor, measured
from millrace_router.policy.prefix_fetches import PrefixSources, best_prefix_fetch, prefix_sources
from millrace_router.policy.scoring import KEY, SCORERS, Inputs, Score, Scorer, best, far
from millrace_router.policy.snapshot import MOST_CHUNK, Key, Placement, PlacementRequest, PrefixFetch, Replica, View

CLOSED = "no capacity"
TOO_SMALL = "its context is too small"
FULL = "its batch is full"
QUEUE_S = 4.0  # of prompts at a flexible worker, as prefill workers allow: the rest waits in the fair queue
PREDICTED = "predicted"  # in the place of a policy's name
NO_SCORE: Score = (0.0, 0.0)
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
                placement = attempt.predicted() or attempt.pair() or attempt.unified() or attempt.flexible()
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
        if (fetched := self.prefix_fetch) is not None:
            found["millrace.route.prefix_source"] = f"{fetched.source.address}/{fetched.source.index}"
            found["millrace.route.prefix_pages"] = fetched.num_pages
        return found


@dataclass(frozen=True, slots=True)
class _Attempt:
    chooser: Chooser
    situation: Situation
    avoid: frozenset[str]
    revision: str | None  # the only one that is asked; None: all are
    note: Note | None
    predictor: Predictor | None = None  # its scorers count instead of the policies'

    def predicted(self) -> Placement | None:
        """The placement with the least risk for limits; of equal ones, that with the earliest first token."""
        view = self.situation.view
        limited = self.situation.want.slo.limited
        unmeasured = measured((*view.prefill, *view.decode, *view.unified)) if limited else None
        if unmeasured is None:
            return None
        attempt = replace(self, predictor=Predictor(unmeasured))
        closed = [self._unable(replica) for replica in view.decode]
        rows = [row for row in (attempt._whole(closed), attempt._paired(closed)) if row is not None]
        return min(rows, key=itemgetter(0))[1] if rows else None

    def pair(self) -> Placement | None:
        closed = [self._unable(replica) for replica in self.situation.view.decode]
        pair = self._pair(closed)
        return None if pair is None else pair[0]

    def unified(self) -> Placement | None:
        return self._alone("unified", self.situation.view.unified)

    def flexible(self) -> Placement | None:
        view = self.situation.view
        replicas = (replica for replica in (*view.prefill, *view.decode) if replica.flexible)
        return self._alone("flexible", tuple(sorted(replicas, key=KEY)))

    def _whole(self, closed: list[str]) -> tuple[Score, Placement] | None:
        """The best replica for both phases, with the pair's score: (risk, seconds until the first token)."""
        view = self.situation.view
        excluded = [*closed, *(self._unable(replica) for replica in view.unified)]
        found = self._select("whole", (*view.decode, *view.unified), excluded)
        return None if found is None else (found[1][:2], Placement(None, found[0]))

    def _paired(self, closed: list[str]) -> tuple[Score, Placement] | None:
        """The best pair, with its score: a handover counts as a later first token."""
        pair = self._pair(closed)
        if pair is None:
            return None
        placement, prefill, decode = pair
        late = 0.0 if placement.decode is None else HANDOVER_S
        return (prefill[0] + decode[0], prefill[1] + late), placement

    def _alone(self, role: str, replicas: tuple[Replica, ...]) -> Placement | None:
        found = self._select(role, replicas, [self._unable(replica) for replica in replicas])
        return None if found is None else Placement(None, found[0])

    def _pair(self, closed: list[str]) -> tuple[Placement, Score, Score] | None:
        """With the scores of both. `closed`: why a decode replica gets nothing, of each."""
        view, want = self.situation.view, self.situation.want
        decodes = [replica for replica, why in zip(view.decode, closed, strict=True) if not why]

        def alone(replica: Replica) -> bool:
            return not (want.prefill_only or _has_partner(replica, decodes))

        no_partner = "no open decode worker is paired with it"
        excluded = [self._unable_to_prefill(r) or (no_partner if alone(r) else "") for r in view.prefill]
        offers = prefix_sources((*view.decode, *view.unified, *view.prefill), self.situation.fetchable, want)
        found = self._select("prefill", view.prefill, excluded, offers=offers)
        if found is None:
            return None
        source, score = found
        own = max(pages.get(source.process, 0) for pages in (self.situation.prefill_pages, self.situation.fetchable))
        prefix_fetch = best_prefix_fetch(source, want.cached(own), want, offers)
        if want.prefill_only:
            return Placement(source, None, prefix_fetch), score, NO_SCORE
        rows = zip(view.decode, closed, strict=True)
        excluded = [why or ("" if _paired(source, r) else "not paired with the prefill worker") for r, why in rows]
        target = self._select("decode", view.decode, excluded, near=source)
        assert target is not None
        return Placement(source, target[0], prefix_fetch), score, target[1]

    def _closed(self, replica: Replica) -> str:
        if replica.capacity <= 0:
            return CLOSED
        if replica.excluded:
            return replica.excluded
        if self.revision is not None and replica.revision != self.revision:
            return f"revision {self.revision!r} is asked first"
        if replica.address == self.situation.want.kept:
            return "kept for an earlier request"
        return "failed this request before" if replica.address in self.avoid else ""

    def _unable_to_prefill(self, replica: Replica) -> str:
        if self.situation.want.tokens >= replica.context:
            return TOO_SMALL
        if closed := self._closed(replica):
            return closed
        long = replica.flexible and replica.tokens * replica.times.token_s > QUEUE_S  # its room is that of its pages
        return "long queue" if long or replica.room <= 0 else ""

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
    ) -> tuple[Replica, Score] | None:
        """Return the choice among the candidates that are not excluded for a reason, and its score."""
        routing, situation = self.chooser.routing, self.situation
        policy, scorer = self._scorer(role)
        pages = situation.prefill_pages if role == "prefill" else situation.decode_pages
        if near is not None and near.labels:
            within = [i for i, why in enumerate(excluded) if not why]
            for i in far(near, [everyone[i] for i in within], routing):
                excluded[within[i]] = "a nearer worker has room"
        if role != "prefill" and policy != Policy.SESSION:  # which waits for the worker that knows the conversation
            self._leave_full(everyone, excluded, pages)
        candidates = [replica for replica, why in zip(everyone, excluded, strict=True) if not why]
        turn = role if role in ("prefill", "decode") else "whole"
        last = situation.last.get(turn) if self.predictor is None else None  # predicted times are hardly ever equal
        inputs = Inputs(situation.want, routing, everyone, pages, last, offers)
        scores = scorer(candidates, inputs) if candidates else []
        at = best(candidates, scores, last) if candidates else None
        if self.note is not None and everyone:
            rows = zip(everyone, excluded, strict=True)
            scored = iter(scores)
            found = [self._candidate(role, r, why, () if why else next(scored), inputs) for r, why in rows]
            if at is not None:
                found[everyone.index(candidates[at])].chosen = True
            self.note(Selection(role=role, policy=policy, candidates=found))
        return None if at is None else (candidates[at], scores[at])

    def _leave_full(self, everyone: tuple[Replica, ...], excluded: list[str], pages: Mapping[Process, float]) -> None:
        """Exclude replicas where the request would wait for a sequence's end, if it would run elsewhere at once and
        compute at most a chunk of the prompt more there.
        """
        want, within = self.situation.want, [i for i, why in enumerate(excluded) if not why]
        if all(everyone[i].free_slots > 0 for i in within):  # nearly always
            return
        have = {i: want.cached(pages.get(everyone[i].process, 0)) for i in within}
        most = max((have[i] for i in within if everyone[i].free_slots > 0), default=-math.inf)
        for i in within:
            if everyone[i].free_slots <= 0 and have[i] <= most + MOST_CHUNK:
                excluded[i] = FULL

    def _candidate(self, role: str, replica: Replica, why: str, score: Score, inputs: Inputs) -> Candidate:
        first_s, each_s = self.predictor.times(role, score) if self.predictor is not None and score else (0.0, 0.0)
        return Candidate(
            address=replica.address,
            replica=replica.index,
            excluded=why,
            score=score,
            cached_tokens=inputs.cached(replica),
            first_token_s=first_s,
            tpot_s=each_s,
        )

    def _scorer(self, role: str) -> tuple[str, Scorer]:
        """The policy's name, and what it scores with."""
        if self.predictor is not None:
            return PREDICTED, getattr(self.predictor, role)
        policy = self.chooser.prefill if role == "prefill" else self.chooser.decode
        return policy, SCORERS[policy]


def _has_partner(source: Replica, decodes: Sequence[Replica]) -> bool:
    for decode in decodes:  # noqa: SIM110 - a generator costs more than all the comparisons: the first one nearly always fits
        if _paired(source, decode):
            return True
    return False


def _paired(source: Replica, decode: Replica) -> bool:
    return source.epoch in decode.sources and source.fingerprint == decode.fingerprint
