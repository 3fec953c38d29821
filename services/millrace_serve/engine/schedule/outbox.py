"""The reports of an engine for its next `Events`, and its running totals."""

from __future__ import annotations

from millrace_serve.engine.core import Events, Failure, FinishReason, Request, SequenceOutput, TokenOutput
from millrace_serve.engine.drafts.counts import DraftCounts
from millrace_serve.engine.schedule.sequence import Sequence

COUNTED = (
    *("steps", "preemptions"),
    "resumed",  # preempted sequences that went on and computed about a page again at most
    "recomputed",  # preempted sequences that computed more again
    "prompt_tokens",  # accepted, cached ones included
    "cached_tokens",  # prompt tokens served from a prefix cache, on whatever tier
    "host_cached_tokens",  # of these, from the host tier
    "output_tokens",
)


class Outbox:
    def __init__(self) -> None:
        self.counters: dict[str, float] = dict.fromkeys(COUNTED, 0)  # of Load
        self.drafts = DraftCounts()
        self.events = Events()

    def refuse(self, request: Request, failure: Failure) -> None:
        first = request.num_prior_outputs
        self.events.outputs.append(SequenceOutput(request.id, first, [], FinishReason.ERROR, failure))

    def admitted(self, seq: Sequence, now: float) -> None:
        """`seq` got its first pages; a sequence that was preempted does not count again."""
        if seq.silent and not seq.preempted:
            seq.queued_s = now - seq.arrived
            self.counters["prompt_tokens"] += len(seq.tokens)
        self.filled(seq, from_host=False)

    def filled(self, seq: Sequence, from_host: bool) -> None:
        """More tokens of `seq` are computed than it ever had; its own, computed before a preemption, are not cached."""
        gained = seq.num_computed - seq.num_known
        if seq.silent and gained > 0:
            seq.num_known = seq.num_computed
            seq.num_cached_tokens += gained
            self.counters["cached_tokens"] += gained
            self.counters["host_cached_tokens"] += gained * from_host

    def output(
        self,
        seq: Sequence,
        tokens: list[TokenOutput],
        finish: FinishReason | None = None,
        error: Failure | None = None,
    ) -> SequenceOutput:
        """`tokens` are the newest of seq.tokens."""
        first = len(seq.tokens) - seq.num_prompt - len(tokens)
        if seq.silent or finish is not None:
            cached, queued_s = (seq.num_cached_tokens, seq.queued_s) if seq.silent else (0, 0.0)
            drafts = (seq.num_drafted, seq.num_accepted) if finish is not None else (0, 0)
            output = SequenceOutput(seq.id, first, tokens, finish, error, cached, queued_s, *drafts)
            seq.silent = False
        else:  # nearly always
            output = SequenceOutput(seq.id, first, tokens)
        self.events.outputs.append(output)
        self.counters["output_tokens"] += len(tokens)
        return output
