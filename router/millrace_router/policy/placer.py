"""The state around the pure choice: the indexes, the turns of equal scores, and the recorded decisions."""

from __future__ import annotations

from millrace_common.metrics import Metrics

from millrace_router.config import RouterConfig
from millrace_router.policy.choose import Chooser, Situation
from millrace_router.policy.decision import Decisions
from millrace_router.policy.indexes import Indexes
from millrace_router.policy.snapshot import Key, Pair, Placement, View, Want


class Placer:
    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        self.indexes = Indexes(config.prefill_policy, config.decode_policy, config.routing)
        self.decisions = Decisions()
        self._chooser = Chooser(config.prefill_policy, config.decode_policy, config.routing)
        self._metrics = metrics
        self._last: dict[str, Key] = {}

    def choose(self, view: View, want: Want) -> Placement | None:
        """A placement is one that will be used: it counts as sent."""
        placement = self._chooser.choose(Situation(view, want, dict(self._last), *self.indexes.lookup(want)))
        if placement is None:
            return None
        decision = placement.decision
        assert decision is not None
        if isinstance(placement, Pair):
            self._last["prefill"] = placement.prefill.key
            if placement.decode is not None:
                self._last["decode"] = placement.decode.key
        else:
            self._last[decision.way] = placement.worker.key
        self.indexes.note(want, placement)
        self.decisions.keep(decision)
        self._metrics.decisions.labels(
            way=decision.way, prefill_policy=self._chooser.prefill, decode_policy=self._chooser.decode
        ).inc()
        self._metrics.expected_cached_tokens.inc(decision.cached_tokens)
        return placement
