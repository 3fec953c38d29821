"""The sequences that decode: their slots and pages, and their rows of a step."""

import math
from collections.abc import Iterator

from millrace_common.step_times import AIM, RECOVER

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
            seq = min(self._ready)
            del self._ready[seq]
            self.pages.run(seq)
            self._decoding[seq] = None
            self._joined.append(seq)

    def _grow(self, plan: Plan) -> None:
        """Pages for the rows of decoding sequences: first one for each sequence that cannot go on without, then those
        of its other rows as far as free pages go. Sequences that get none sit this step out.
        """
        q = self._num_queries
        short = [seq for seq in self._decoding if seq.capacity < seq.num_reserved + q and seq.capacity < seq.limit - 1]
        if not short:
            return
        cache = self.pages.cache
        stuck = [seq for seq in short if seq.num_reserved >= seq.capacity]
        filled = {seq for seq in self.leaving if seq.filling}  # perhaps for as long as a lost worker likes
        while cache.available < len(stuck) and self.leaving == filled:
            victim = max((*self._ready, *self._local_prompts(), *self._decoding))
            if filled and stuck == [victim]:
                break  # in the queue it would need as many pages
            self._preempt(victim)
            stuck, short = ([seq for seq in group if seq is not victim] for group in (stuck, short))
        if cache.available < len(stuck):
            stuck = sorted(stuck)[: cache.available]
        for seq in stuck:
            self.pages.grow(seq, 1)
        plan.grown = stuck + self._grow_further(short) if q > 1 else stuck

    def _local_prompts(self) -> Iterator[Sequence]:
        return (seq for seq in self._prefilling if not seq.exports)

    def _grow_further(self, short: list[Sequence]) -> list[Sequence]:
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
            if reserved < capacity:
                seq.num_computed = len(seq.tokens)
                seq.num_reserved = reserved + q if reserved + q < capacity else capacity
                seq.inflight += 1
                keys += reserved
                if seq.tpot_limit_s < limit_s:
                    limit_s = seq.tpot_limit_s
                decode.append(seq)
        plan.limit_s, plan.work = limit_s, Work(len(decode), keys)
        if limit_s < math.inf:
            plan.spare_s = self._spare_s(plan)

    def _spare_s(self, plan: Plan) -> float:
        """By how much prompts may make the step longer. A stream that is late by more than the longest chunk takes is
        forgiven the rest: others would wait for what nothing makes up for. Written out as one loop: it is in each step.
        """
        times, done_at, spare_s = self.speeds.times, self.speeds.done_at(plan.began), math.inf
        step_s, worst_s = times.step_s(*plan.work), -times.prompts_s(self.config.max_prefill_tokens)
        recover = min(self.outputs.lower_quartile, RECOVER)
        for seq in plan.decode:
            if (aim_s := AIM * seq.tpot_limit_s) < math.inf:
                tokens = len(seq.tokens) + seq.inflight - 1  # at `done_at`
                if seq.due_s != seq.due_s:  # nan
                    seq.due_s = done_at - aim_s * tokens
                rest, saved_s = seq.limit - tokens, aim_s - step_s
                own_s = seq.due_s + aim_s * tokens - done_at + (rest if rest < recover else recover) * saved_s
                if own_s < worst_s or own_s > 2 * RECOVER * saved_s > 0:
                    kept_s = max(worst_s, min(own_s, 2 * RECOVER * saved_s))
                    seq.due_s += kept_s - own_s
                    own_s = kept_s
                if own_s < spare_s:
                    spare_s = own_s
        return spare_s

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
        needs = [(self._rest(seq), len(seq.tokens) - seq.found.cached_tokens) for seq in holders]
        if not newcomer.exports:
            needs.append((self._rest(newcomer), 0))
        return max(self.pages.count(need(needs)), len(self._ready) + len(self._decoding))

    def _rest(self, seq: Sequence) -> int:
        return min(self.outputs.rest(seq.num_outputs, seq.order[1]), seq.limit - len(seq.tokens))
