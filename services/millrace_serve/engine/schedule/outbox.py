"""The reports of an engine for its next `Events`, and its running totals."""

from __future__ import annotations

from millrace_serve.engine.core import (
    Events,
    Failure,
    FinishReason,
    KvPart,
    KvReserved,
    Request,
    SequenceOutput,
    TokenOutput,
)
from millrace_serve.engine.schedule.sequence import Sequence


class Outbox:
    def __init__(self) -> None:
        self.totals = dict.fromkeys(("preemptions", "steps", "cached_tokens", "prompt_tokens", "output_tokens"), 0)
        self._events = Events()

    def __bool__(self) -> bool:
        """Cache changes alone wait for the next step: they are hints for routers."""
        events = self._events
        return bool(events.outputs or events.parts or events.reserved)

    def refuse(self, request: Request, failure: Failure) -> None:
        first = request.num_prior_outputs
        self._events.outputs.append(SequenceOutput(request.id, first, [], FinishReason.ERROR, failure))

    def admitted(self, seq: Sequence, now: float) -> None:
        """`seq` got its first pages; a sequence that was preempted does not count again."""
        if not seq.silent:
            return
        seq.num_cached_tokens = seq.num_computed
        seq.queued_s = now - seq.arrived
        self.totals["prompt_tokens"] += len(seq.tokens)
        self.totals["cached_tokens"] += seq.num_computed

    def output(
        self,
        seq: Sequence,
        tokens: list[TokenOutput],
        finish: FinishReason | None = None,
        error: Failure | None = None,
    ) -> SequenceOutput:
        """`tokens` are the newest of seq.tokens."""
        cached, queued_s = (seq.num_cached_tokens, seq.queued_s) if seq.silent else (0, 0.0)
        output = SequenceOutput(seq.id, seq.num_outputs - len(tokens), tokens, finish, error, cached, queued_s)
        seq.silent = False
        self._events.outputs.append(output)
        self.totals["output_tokens"] += len(tokens)
        return output

    def part(self, part: KvPart) -> None:
        self._events.parts.append(part)

    def reserved(self, reserved: KvReserved) -> None:
        self._events.reserved.append(reserved)

    def take(self) -> Events:
        events, self._events = self._events, Events()
        return events
