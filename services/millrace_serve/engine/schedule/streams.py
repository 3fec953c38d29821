"""The sequences that decode: their slots and pages, and their rows of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator

from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.schedule.expected import need
from millrace_serve.engine.schedule.pages import Pages
from millrace_serve.engine.schedule.plan import Plan, Work
from millrace_serve.engine.schedule.prompts import Prompts
from millrace_serve.engine.schedule.requests import EngineRequests
from millrace_serve.engine.schedule.sequence import Phase, Sequence
from millrace_serve.engine.schedule.speeds import Speeds


class Streams(Prompts):
    def __init__(self, config: EngineConfig, requests: EngineRequests, pages: Pages, speeds: Speeds) -> None:
        super().__init__(config, requests, pages, speeds)
        self._num_queries = config.most_queries
        self._importing: set[Sequence] = set()  # a transfer into their pages may be in flight, even if they are DONE
        self._ready: dict[Sequence, None] = {}
        self._decoding: dict[Sequence, None] = {}

    def _take_off(self, seq: Sequence) -> None:
        super()._take_off(seq)
        self._ready.pop(seq, None)
        self._decoding.pop(seq, None)

    def _join_ready(self) -> None:
        while self._ready and self.pages.has_slot():
            seq = min(self._ready, key=_order)
            del self._ready[seq]
            self.pages.run(seq)
            self._decoding[seq] = None
            self._joined.append(seq)

    def _grow(self, plan: Plan) -> None:
        """Pages for the rows of decoding sequences: first one for each sequence that cannot go on without, then more
        for drafts as far as free pages go. Sequences that get none sit this step out.
        """
        q = self._num_queries
        short = [
            seq
            for seq in self._decoding
            if seq.capacity < seq.num_reserved + q and seq.capacity < seq.limit - 1 and not seq.undecided
        ]
        if not short:
            return
        cache = self.pages.cache
        stuck = [seq for seq in short if seq.num_reserved >= seq.capacity]
        while cache.available < len(stuck) and not self.leaving:
            victim = max((*self._ready, *self._local_prompts(), *self._decoding), key=_order)
            self._preempt(victim)
            stuck, short = ([seq for seq in group if seq is not victim] for group in (stuck, short))
        if cache.available < len(stuck):
            stuck = sorted(stuck, key=_order)[: cache.available]
        for seq in stuck:
            self.pages.grow(seq, 1)
        plan.grown = stuck + self._grow_for_drafts(short) if q > 1 else stuck

    def _local_prompts(self) -> Iterator[Sequence]:
        return (seq for seq in self._prefilling if not seq.exports)

    def _grow_for_drafts(self, short: list[Sequence]) -> list[Sequence]:
        """Return the sequences that got pages beyond the one that their next token needs."""
        grown = []
        for seq in short:
            wanted = min(seq.num_reserved + self._num_queries, seq.limit - 1)
            missing = min(self.pages.count(wanted) - len(seq.pages), self.pages.cache.available)
            if missing > 0 and seq.num_reserved < seq.capacity:
                self.pages.grow(seq, missing)
                grown.append(seq)
        return grown

    def _take_decodes(self, plan: Plan) -> None:
        decode, q, keys, limit_s = plan.decode, self._num_queries, 0, math.inf
        for seq in self._decoding:
            reserved, capacity = seq.num_reserved, seq.capacity
            if reserved < capacity and (seq.grammar is None or not seq.undecided):
                seq.num_computed = len(seq.tokens)
                seq.num_reserved = reserved + q if reserved + q < capacity else capacity
                seq.inflight += 1
                keys += reserved
                if seq.tpot_limit_s < limit_s:
                    limit_s = seq.tpot_limit_s
                decode.append(seq)
        plan.limit_s, plan.work = limit_s, Work(len(decode), keys)

    def _narrow(self, seq: Sequence) -> None:
        """The upper bound, now that the count of the oldest launched step is known."""
        written = len(seq.tokens) - 1  # the newest token is the next step's input
        seq.num_reserved = min(written + seq.inflight * self._num_queries, seq.capacity)

    def _take_chunk(self, plan: Plan, seq: Sequence, budget: int) -> int:
        taken = super()._take_chunk(plan, seq, budget)
        if taken and plan.chunks[-1].samples and not seq.exports:
            del self._prefilling[seq]
            self._decoding[seq] = None
        return taken

    def _headroom(self, newcomer: Sequence) -> int:
        """Pages that stay back: one for each sequence that decodes or is ready to, or what all outputs are expected to
        need if that is more. Nothing stays back for a newcomer that is alone. Exports grow no more, and nobody knows
        when their pages come back.
        """
        importing = (seq for seq in self._importing if seq.phase is Phase.IMPORTING)
        holders = [*importing, *self._ready, *self._local_prompts(), *self._decoding]
        if not holders:
            return 0
        needs = [(self._rest(seq), len(seq.tokens) - seq.num_cached_tokens) for seq in holders]
        if not newcomer.exports:
            needs.append((self._rest(newcomer), 0))
        return max(self.pages.count(need(needs)), len(self._ready) + len(self._decoding))

    def _rest(self, seq: Sequence) -> int:
        return min(self.outputs.rest(seq.num_outputs, seq.order[1]), seq.limit - len(seq.tokens))


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order
