"""The state around the pure choice: the indexes, the turns of equal scores, and the recorded decisions."""

from __future__ import annotations

from collections import deque

from millrace_common.metrics import Metrics

from millrace_router.config import RouterConfig
from millrace_router.policy.choose import Chooser, Decision, Situation
from millrace_router.policy.indexes import Indexes
from millrace_router.policy.snapshot import Key, View, Want

REMEMBERED = 1024  # decisions: seconds to minutes of a router


class Placer:
    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        self.indexes = Indexes(config.prefill_policy, config.decode_policy, config.routing)
        self.decisions: deque[Decision] = deque(maxlen=REMEMBERED)
        self._chooser = Chooser(config.prefill_policy, config.decode_policy, config.routing)
        self._metrics = metrics
        self._last: dict[str, Key] = {}

    def choose(self, view: View, want: Want) -> Decision | None:
        """A decision is carried out by the caller: its requests count as sent."""
        decision = self._chooser.choose(Situation(view, want, dict(self._last), *self.indexes.lookup(want)))
        if decision is None:
            return None
        prefill, decode = decision.placement.prefill, decision.placement.decode
        if prefill is not None:
            self._last["prefill"] = prefill.key
        if decode is not None:
            self._last[decision.way if prefill is None else "decode"] = decode.key
        self.indexes.note(want, decision.placement)
        self.decisions.append(decision)
        self._metrics.decisions.labels(
            way=decision.way, prefill_policy=self._chooser.prefill, decode_policy=self._chooser.decode
        ).inc()
        self._metrics.expected_cached_tokens.inc(decision.cached_tokens)
        return decision

    def decisions_of(self, request_id: str) -> list[Decision]:
        """The decisions of all continuations and attempts of a request, oldest first."""
        return [decision for decision in self.decisions if decision.situation.want.request_id == request_id]
