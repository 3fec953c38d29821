"""Drafts of an engine: which may be used, how many were verified, and how many were right."""

import itertools

from millrace_serve.engine.schedule.sequence import Sequence


def usable(drafts: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The drafts before the first one that is no token of ours. Drafts are only hints: a bad one fails nothing."""
    return tuple(itertools.takewhile(lambda draft: draft < vocab_size, drafts))


class DraftCounts:
    """Of one engine since its start, by their place behind the newest token."""

    def __init__(self, draft_tokens: int) -> None:
        self.drafted, self.accepted = [0] * draft_tokens, [0] * draft_tokens

    def add(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """Count the drafts that a step verified for `seq`, and those of them that are outputs."""
        seq.num_drafted += drafted
        seq.num_accepted += accepted
        for place in range(drafted):
            self.drafted[place] += 1
            self.accepted[place] += place < accepted
