"""What both schedulers do alike with their sequences: enrol them, give them pages and a slot, let them speak, let
them go.

A sequence that leaves (finished, preempted, parked) is `settle`d: at once when no launched step names it, otherwise
by the commit of the last such step. Only then are its pages and its slot given to somebody else.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable

from millrace_common.page_hash import page_hashes

from millrace_serve.engine.cache.block_pool import Holder
from millrace_serve.engine.cache.kv_cache import KvCache
from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import (
    Events,
    Failure,
    FinishReason,
    KvPart,
    KvReserved,
    Load,
    Request,
    RequestId,
    SequenceOutput,
    TokenOutput,
)
from millrace_serve.engine.grammar.grammars import Grammars, Walk
from millrace_serve.engine.schedule.limits import ModelFacts, refusal, sequence_limit
from millrace_serve.engine.schedule.plan import Chunk
from millrace_serve.engine.schedule.sequence import Phase, Sequence
from millrace_serve.engine.schedule.waiting import WaitingQueue

log = logging.getLogger(__name__)

ENDED_DEADLINES = 64  # of requests that have ended, kept beside as many as there are active ones
Deadline = tuple[float, tuple[int, int], Sequence]


class Roster:
    def __init__(
        self,
        config: EngineConfig,
        role: Role,
        facts: ModelFacts,
        clock: Callable[[], float],
        grammars: Grammars | None = None,
    ) -> None:
        self.config = config
        self.grammars = grammars or Grammars()
        self.cache = KvCache(config.num_pages, config.page_size, config.prefix_cache)
        self.live: dict[RequestId, Sequence] = {}  # everybody who holds anything or is waited for
        self.waiting = WaitingQueue()
        self.leaving: set[Sequence] = set()  # left, but a launched step still names them
        self.parts: list[KvPart] = []
        self.reserved: list[KvReserved] = []
        self.totals = dict.fromkeys(("preemptions", "steps", "cached_tokens", "prompt_tokens", "output_tokens"), 0)
        self.num_active = 0  # requests that still need this engine's work: neither DONE nor PARKED
        self.blocked = False  # the head of the queue lacked pages when it was last tried
        self._role = role
        self._facts = facts
        self._clock = clock
        self._outputs: list[SequenceOutput] = []
        self._slots = list(range(config.max_running - 1, -1, -1))
        self._arrivals = itertools.count()
        self._deadlines: list[Deadline] = []  # a heap

    # ------------------------------------------------------------------------------------------ coming in

    def enrol(self, request: Request) -> Sequence | None:
        """A WAITING sequence that is in no queue yet; None when the request was refused, which has been said."""
        if request.id in self.live:
            log.warning("request %s is here already; its second submission is ignored", request.id)
            return None
        failure = refusal(request, self.config, self._facts, self._role)
        if failure is None and self.room() <= 0:
            most = self.config.max_running + self.config.max_waiting
            failure = Failure("OVERLOADED", f"max_running + max_waiting = {most} requests are here")
        walk = None
        if failure is None and request.sampling.grammar is not None:
            walk = self.grammars.walk(request)
            failure = None if isinstance(walk, Walk) else walk
        if failure is not None:
            first = request.num_prior_outputs
            self._outputs.append(SequenceOutput(request.id, first, [], FinishReason.ERROR, failure))
            return None
        params = request.sampling
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._facts.eos_token_ids)
        deadline = None if request.timeout_s is None else self._clock() + request.timeout_s
        order = (-request.priority, next(self._arrivals))
        hashes = page_hashes(request.token_ids, self.config.page_size)  # now: nobody waits for them yet
        seq = Sequence(request, order, deadline, sequence_limit(request, self.config), stop_ids, hashes)
        seq.grammar = walk if isinstance(walk, Walk) else None
        seq.arrived = self._clock()
        self.live[seq.id] = seq
        self.num_active += 1
        if deadline is not None:
            self._watch((deadline, order, seq))
        return seq

    def take_pages(self, seq: Sequence, num_tokens: int, max_cached_pages: int, headroom: int) -> bool:
        """Give `seq` pages for its first `num_tokens`, cached ones as far as they go. False: not enough pages."""
        cached, prefix = self.cache.match(seq.tokens, max_cached_pages)
        need = self.pages_for(num_tokens) - len(cached)
        if need + headroom > self.cache.available:
            self.cache.release(prefix, cached)
            self.blocked = True
            return False
        own = self.cache.allocate(need)
        assert own is not None
        seq.pages, seq.prefix = cached + own, prefix
        seq.num_scheduled = len(cached) * self.config.page_size
        if seq.silent:
            seq.num_cached_tokens = seq.num_scheduled
            seq.queued_s = self._clock() - seq.arrived
            self.totals["prompt_tokens"] += len(seq.tokens)
            self.totals["cached_tokens"] += seq.num_scheduled
        return True

    def has_slot(self) -> bool:
        return bool(self._slots)

    def run(self, seq: Sequence) -> None:
        seq.slot = self._slots.pop()
        seq.enter(Phase.RUNNING)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    # ------------------------------------------------------------------------------------------ running

    def next_chunk(self, seq: Sequence, budget: int) -> Chunk:
        start = seq.num_scheduled
        end = min(start + budget, len(seq.tokens))
        seq.num_scheduled = end
        seq.inflight += 1
        return Chunk(seq, start, end, samples=end == len(seq.tokens))

    def say(
        self,
        seq: Sequence,
        tokens: list[TokenOutput],
        finish: FinishReason | None = None,
        error: Failure | None = None,
    ) -> SequenceOutput:
        """Put an output into the next Events. `tokens` are the newest of seq.tokens."""
        cached, queued_s = (seq.num_cached_tokens, seq.queued_s) if seq.silent else (0, 0.0)
        output = SequenceOutput(seq.id, seq.num_outputs - len(tokens), tokens, finish, error, cached, queued_s)
        seq.silent = False
        self._outputs.append(output)
        self.totals["output_tokens"] += len(tokens)
        return output

    # ------------------------------------------------------------------------------------------ going out

    def leave(self, seq: Sequence, phase: Phase) -> None:
        """`seq`, already taken off its scheduler's lists, goes to WAITING, PARKED or DONE."""
        if phase is not Phase.WAITING and seq.phase is not Phase.PARKED:
            self.num_active -= 1
        seq.enter(phase)
        self.settle(seq)

    def settle(self, seq: Sequence) -> None:
        """Free what a sequence that has left still holds, unless a launched step or a transfer uses it."""
        if seq.in_transfer:
            return
        if seq.inflight:
            self.leaving.add(seq)
            return
        self.leaving.discard(seq)
        if seq.slot >= 0:
            self._slots.append(seq.slot)
            seq.slot = -1
        if seq.phase is Phase.PARKED:
            assert seq.prefix is not None
            self.cache.park(seq.prefix, seq.pages)
            del seq.pages[seq.num_published :]
            return
        self._release_pages(seq)
        if seq.phase is Phase.WAITING:
            self.waiting.push(seq)
        else:
            del self.live[seq.id]

    def unpark(self, seq: Sequence) -> None:
        """The lease of a PARKED prompt has ended."""
        published = seq.pages[: seq.num_published]
        seq.enter(Phase.DONE)
        if seq.inflight:  # aborted an instant ago: it still has its pages, and `settle` will take them
            self.cache.pool.drop(published, Holder.PUBLISHED)
            return
        assert seq.prefix is not None
        self.cache.unpublish(seq.prefix, published)
        self._forget_corrupt(seq)
        del self.live[seq.id]

    def _release_pages(self, seq: Sequence) -> None:
        if seq.prefix is None:
            return
        # A token's KV is written by the step that samples the next one, and the canary learns it one step later still.
        written = min(seq.num_scheduled, max(len(seq.tokens) - 2, 0))
        if seq.trusted and not seq.corrupt:
            full = written // self.config.page_size
            hashes = seq.page_hashes(full, self.config.page_size)
            self.cache.insert(seq.prefix, seq.tokens, seq.pages[:full], hashes)
        self.cache.release(seq.prefix, seq.pages)
        self._forget_corrupt(seq)
        seq.pages, seq.prefix, seq.num_scheduled, seq.trusted = [], None, 0, True

    def _forget_corrupt(self, seq: Sequence) -> None:
        """The wrong page may have come from the prefix cache, where its sequence has just left it idle."""
        if seq.corrupt:
            self.cache.flush()

    def _watch(self, deadline: Deadline) -> None:
        """Requests that have ended are forgotten long before their deadlines: each would keep its tokens."""
        heapq.heappush(self._deadlines, deadline)
        if len(self._deadlines) > 2 * self.num_active + ENDED_DEADLINES:
            self._deadlines = [one for one in self._deadlines if not _is_over(one[2])]
            heapq.heapify(self._deadlines)

    def expired(self) -> list[Sequence]:
        """Sequences whose deadline has passed and whose work is not over; each is returned once."""
        now, late = self._clock(), []
        while self._deadlines and self._deadlines[0][0] <= now:
            seq = heapq.heappop(self._deadlines)[2]
            if not _is_over(seq):
                late.append(seq)
        return late

    # ------------------------------------------------------------------------------------------ looking in

    def room(self) -> int:
        here = self.num_active + self.grammars.waiting
        return self.config.max_running + self.config.max_waiting - here

    def seconds_to_deadline(self) -> float | None:
        while self._deadlines and _is_over(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return max(self._deadlines[0][0] - self._clock(), 0.0) if self._deadlines else None

    def has_events(self) -> bool:
        return bool(self._outputs or self.parts or self.reserved)

    def take_events(self) -> Events:
        events = Events(self._outputs, self.parts, self.reserved, cache=self.cache.take_changes())
        self._outputs, self.parts, self.reserved = [], [], []
        return events

    def load(self, running: int, importing: int, exporting: int) -> Load:
        pool = self.cache.pool
        return Load(
            running=running,
            waiting=len(self.waiting) + self.grammars.waiting,
            importing=importing,
            exporting=exporting,
            waiting_tokens=self.waiting.num_tokens,
            pages_total=pool.total,
            pages_free=pool.num_free,
            pages_cached=pool.num_cached,
            pages_published=pool.num_published,
            pages_running=pool.num_running,
            credits=0 if self.blocked else max(self.room(), 0),
            **self.totals,
        )


def _is_over(seq: Sequence) -> bool:
    """This engine has no more work with it."""
    return seq.phase in (Phase.DONE, Phase.PARKED)
