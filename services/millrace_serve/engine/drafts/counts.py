"""How many drafts were verified, and how many were right."""

from __future__ import annotations

from millrace_serve.engine.config import MOST_DRAFTS
from millrace_serve.engine.schedule.sequence import Sequence


class DraftCounts:
    """Of one engine since its start, by their place behind the newest token."""

    def __init__(self) -> None:
        self.drafted = [0] * MOST_DRAFTS
        self.accepted = [0] * MOST_DRAFTS

    def add(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """Count the drafts that a step verified for `seq`, and those of them that are outputs."""
        seq.num_drafted += drafted
        seq.num_accepted += accepted
        for place in range(drafted):
            self.drafted[place] += 1
            self.accepted[place] += place < accepted
