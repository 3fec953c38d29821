"""The reports of an engine for its next `Events`, and its running totals."""

from msgspec.structs import astuple

from millrace_serve.engine.core import CachedTokens, Events, Failure, FinishReason, Request, SequenceOutput, TokenOutput
from millrace_serve.engine.schedule.sequence import Sequence

COUNTED = (
    *("steps", "preemptions"),
    "resumed",  # preempted sequences that went on and computed about a page again at most
    "recomputed",  # preempted sequences that computed more again
    "prompt_tokens",  # accepted, cached ones included
    *CachedTokens.__struct_fields__,
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
            gains = gained, gained * from_host, gained * fetched
            seq.found = CachedTokens(*map(sum, zip(astuple(seq.found), gains, strict=True)))
            for name, tokens in zip(CachedTokens.__struct_fields__, gains, strict=True):
                self.counters[name] += tokens

    def report(
        self, seq: Sequence, tokens: list[TokenOutput], finish: FinishReason | None = None, error: Failure | None = None
    ) -> SequenceOutput:
        """Of one step. `tokens` are the newest of `seq`."""
        first = len(seq.tokens) - seq.num_prompt - len(tokens)
        if not seq.silent and finish is None:  # nearly always
            output = SequenceOutput(seq.id, first, tokens)
        else:
            found, queued_s = (seq.found, seq.queued_s) if seq.silent else (CachedTokens(), 0.0)
            drafts = (seq.num_drafted, seq.num_accepted) if finish is not None else (0, 0)
            seq.silent = False
            output = SequenceOutput(seq.id, first, tokens, finish, error, found, queued_s, *drafts)
        self.put(output)
        return output

    def put(self, output: SequenceOutput) -> None:
        self.events.outputs.append(output)
        self.counters["output_tokens"] += len(output.tokens)
