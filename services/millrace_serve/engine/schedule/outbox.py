"""The reports of an engine for its next `Events`, and its running totals."""

from millrace_serve.engine.core import Events, Failure, FinishReason, Request, SequenceOutput
from millrace_serve.engine.schedule.sequence import Sequence

COUNTED = (
    *("steps", "preemptions"),
    "resumed",  # preempted sequences that went on and computed about a page again at most
    "recomputed",  # preempted sequences that computed more again
    "prompt_tokens",  # accepted, cached ones included
    "cached_tokens",  # prompt tokens served from a prefix cache, on whatever tier
    "host_cached_tokens",  # of these, from the host tier
    "fetched_tokens",  # of these, from another worker
    "output_tokens",
)


class Outbox:
    def __init__(self) -> None:
        self.counters: dict[str, float] = dict.fromkeys(COUNTED, 0)  # of Load
        self.events = Events()

    def refuse(self, request: Request, failure: Failure) -> None:
        self.put(SequenceOutput(request.id, request.num_prior_outputs, [], FinishReason.ERROR, failure))

    def admitted(self, seq: Sequence, now: float) -> None:
        """`seq` got its first pages; a sequence that was preempted does not count again."""
        if seq.silent and not seq.preempted:
            seq.queued_s = now - seq.arrived
            self.counters["prompt_tokens"] += len(seq.tokens)
        self.filled(seq)

    def filled(self, seq: Sequence, from_host: bool = False, fetched: bool = False) -> None:
        """More tokens of `seq` are computed than it ever had; its own, computed before a preemption, are not cached."""
        gained = seq.num_computed - seq.num_known
        if seq.silent and gained > 0:
            seq.num_known = seq.num_computed
            seq.num_cached_tokens += gained
            self.counters["cached_tokens"] += gained
            seq.num_host_cached += gained * from_host
            self.counters["host_cached_tokens"] += gained * from_host
            seq.num_fetched += gained * fetched
            self.counters["fetched_tokens"] += gained * fetched

    def put(self, output: SequenceOutput) -> None:
        self.events.outputs.append(output)
        self.counters["output_tokens"] += len(output.tokens)
