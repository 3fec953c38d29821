"""The explanation of a placement.

A decision costs nothing when it is made: it keeps the immutable situation. Choosing is a pure function, so choosing
once more, with notes, explains it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millrace_router.policy.scoring import Score
from millrace_router.policy.snapshot import Key, Pair, Placement

if TYPE_CHECKING:
    from millrace_router.policy.choose import Chooser, Situation

CLOSED = "no credits"
REMEMBERED = 1024  # decisions: seconds to minutes of a router


@dataclass(frozen=True, slots=True)
class Candidate:
    key: Key
    score: Score  # lowest wins; empty when it was excluded
    excluded: str  # why; empty when it was scored
    cached_tokens: int  # of the prompt, as far as the policy's index knows


@dataclass(frozen=True, slots=True)
class Selection:
    """One question to a policy. A request asks one or several: see choose.py."""

    role: str  # "local", "prefill", "decode" or "unified"
    policy: str
    candidates: tuple[Candidate, ...]
    chosen: Key | None  # None: every candidate was excluded


@dataclass(frozen=True, slots=True)
class Decision:
    chooser: Chooser
    situation: Situation
    placement: Placement

    @property
    def way(self) -> str:
        """ "pair", "prefill_only", "local" or "unified"."""
        if isinstance(self.placement, Pair):
            return "prefill_only" if self.placement.decode is None else "pair"
        return "unified" if self.placement.worker in self.situation.view.unified else "local"

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that are expected to be cached on the replica that computes the prompt."""
        want, situation = self.situation.want, self.situation
        if isinstance(self.placement, Pair):
            return want.cached(situation.prefill_pages.get(self.placement.prefill.process, 0))
        return want.cached(situation.decode_pages.get(self.placement.worker.process, 0))

    def explain(self) -> tuple[Selection, ...]:
        return self.chooser.explain(self.situation)

    def attributes(self) -> dict[str, str | int]:
        """For a span of the request's trace."""
        found: dict[str, str | int] = {
            "millrace.route.way": self.way,
            "millrace.route.cached_tokens": self.cached_tokens,
        }
        pair = isinstance(self.placement, Pair)
        prefill = self.placement.prefill if isinstance(self.placement, Pair) else None
        decode = self.placement.decode if isinstance(self.placement, Pair) else self.placement.worker
        for role, policy, replica in (
            ("prefill", self.chooser.prefill, prefill),
            ("decode" if pair else "worker", self.chooser.decode, decode),
        ):
            if replica is not None:
                found[f"millrace.route.{role}"] = f"{replica.address}/{replica.index}"
                found[f"millrace.route.{role}_policy"] = str(policy)
        return found


class Decisions:
    """The latest ones, for operators' questions."""

    def __init__(self) -> None:
        self._ring: deque[Decision] = deque(maxlen=REMEMBERED)

    def keep(self, decision: Decision) -> None:
        self._ring.append(decision)

    def of(self, request_id: str) -> list[Decision]:
        """Of all continuations and attempts of a request, oldest first."""
        return [decision for decision in self._ring if decision.situation.want.request_id == request_id]
