"""Which of two runs of one continuation the client gets. Pure: it looks at their flows.

    one run              until it has said something or has ended
    two runs, in a race  the first one to say something wins; one that fails leaves it to the other
    decided              for ever; both have failed: the error of the first

Nothing of a run is shown before it has won, so the client never sees two of them. Both would say the same: noise for
sampling depends on the seed, which they share.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace_router.flow.flow import Flow, Stage


@dataclass(slots=True)
class Hedge:
    flows: list[Flow] = field(default_factory=list)
    winner: int | None = None

    @property
    def leader(self) -> int:
        """Whose flow is to be looked at."""
        if self.winner is not None:
            return self.winner
        return next((i for i, flow in enumerate(self.flows) if not flow.ended), 0)

    @property
    def late(self) -> bool:
        """A second run may help: workers have the first one, and have said nothing."""
        return self.winner is None and len(self.flows) == 1 and self.flows[0].stage is Stage.PREFILL

    def look(self) -> bool:
        """Whether this is the moment of the decision. To be called after every change."""
        if self.winner is not None:
            return False
        for i, flow in enumerate(self.flows):
            if flow.outputs or flow.stage is Stage.DONE:
                self.winner = i
        if self.winner is None and all(flow.ended for flow in self.flows):
            self.winner = 0
        return self.winner is not None
