"""The interface of a scheduler, and the common part of both: how a sequence leaves.

A sequence that leaves (finished, preempted, held) gives its slot and pages back at once when no launched step names
it, otherwise with the commit of the last such step. Only then may another sequence have them.

Leading pages of a running prompt may be filled by somebody else: a copy from the host's memory, a read from another
worker. `_fill` begins that; the sequence has its slot and pages and plans no chunk; `_filled` ends it, and the rest of
the prompt is computed. A sequence that leaves meanwhile keeps its pages until then.

The rest of a long prompt (`context_parallel_tokens`) is computed in shared chunks only, one in each turn that the
replicas give this one. In such a step every replica has half of its tokens for the shared chunk and half for prompts of
its own.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator

from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.core import (
    Events,
    Failure,
    FinishReason,
    FlushCache,
    LeaseEnded,
    Load,
    SchedulerInput,
    ServePrefix,
    Submit,
)
from millrace_serve.engine.offload.host_copies import HostCopies
from millrace_serve.engine.schedule.outbox import Outbox
from millrace_serve.engine.schedule.pages import Pages
from millrace_serve.engine.schedule.plan import Chunk, ContextParallelTurn, Plan, StepOutput
from millrace_serve.engine.schedule.requests import EngineRequests
from millrace_serve.engine.schedule.sequence import Phase, Sequence, Transfer, Trust
from millrace_serve.engine.schedule.served_pages import ServedPages
from millrace_serve.engine.schedule.waiting import Waits


class Scheduler(abc.ABC):
    def __init__(self, config: EngineConfig, requests: EngineRequests, pages: Pages) -> None:
        self.config, self.requests, self.pages = config, requests, pages
        self.outbox = Outbox()
        self.host = HostCopies(pages.cache)
        self.served_pages = ServedPages(pages.cache)
        self.leaving: set[Sequence] = set()  # have left, but a launched step still names them
        self.turn: ContextParallelTurn | None = None  # whether the next step has a shared chunk; the engine sets it
        self._prefilling: dict[Sequence, None] = {}  # in order of admission
        self._joined: list[Sequence] = []  # got a slot that no plan has named yet
        self._blocked = False  # the head of the queue lacked pages when it was last tried
        self._waits = Waits()

    @abc.abstractmethod
    def handle(self, msg: SchedulerInput) -> None:
        """Never raises for a bad request: the request ends in an output with finish ERROR."""

    def _handle_alike(self, msg: SchedulerInput) -> None:
        """New requests, and messages about the prefix cache: alike in both schedulers."""
        match msg:
            case Submit(request):
                enrolled = self.requests.enrol(request)
                if isinstance(enrolled, Failure):
                    self.outbox.refuse(request, enrolled)
                elif enrolled is not None and enrolled.phase is Phase.WAITING:
                    self.requests.waiting.push(enrolled)
            case ServePrefix(id, blocks):
                self.outbox.events.chunks.append(self.served_pages.serve_prefix(id, blocks))
            case LeaseEnded(id):
                self.served_pages.end(id)
            case FlushCache():
                self.pages.cache.flush()
            case _:
                raise TypeError(f"a {type(self).__name__} does not take {type(msg).__name__}")

    @abc.abstractmethod
    def schedule(self) -> Plan | None:
        """The next step; None: nothing can run."""

    def reserve(self) -> None:
        """Between two steps: pages for the first prompts of the queue, if their KV comes from elsewhere."""
        while (seq := self.requests.waiting.head()) and self._admit_head(seq, budget=0):
            pass

    @abc.abstractmethod
    def commit(self, plan: Plan, output: StepOutput) -> None:
        """Take the results of the oldest launched step."""

    @abc.abstractmethod
    def load(self) -> Load: ...

    def take_events(self) -> Events:
        events, self.outbox.events = self.outbox.events, Events()
        events.cache = self.pages.cache.take_changes()
        events.waits = self._waits.look(self._idle(), self.requests.clock())
        return events

    def seconds_to_look(self) -> float | None:
        """To the next look at what waits here; None: nothing does."""
        return self._waits.due_s(self._idle(), self.requests.clock())

    def _idle(self) -> Iterator[Sequence]:
        """What waits for pages, a slot or the budget of a step. Of prompts that have begun some may be computed now."""
        yield from self.requests.waiting
        yield from (seq for seq in self._prefilling if not seq.filling)

    def _admit(self, seq: Sequence, max_cached_pages: int, headroom: int) -> bool:
        """Pages for the head of the queue, which leaves it."""
        if not self.pages.take(seq, max_cached_pages, headroom):
            self._blocked = True
            return False
        self.outbox.admitted(seq, self.requests.clock())
        self.requests.waiting.discard(seq)
        return True

    @property
    def _chunk_tokens(self) -> int:
        """Prompt tokens of this replica's own in the next step."""
        most = self.config.max_prefill_tokens
        return max(most - self.config.shared_tokens, 1) if self.turn else most

    def _is_long(self, seq: Sequence) -> bool:
        return not seq.filling and 0 < self.config.context_parallel_tokens <= len(seq.tokens) - seq.num_computed

    def _take_own(self, plan: Plan, seq: Sequence, budget: int) -> int:
        """Plan a chunk that this replica computes alone, unless the prompt is long. Returns its tokens."""
        return 0 if seq.filling or self._is_long(seq) else self._take_chunk(plan, seq, budget)

    def _take_chunks(self, plan: Plan) -> None:
        """Chunks for the admitted prompts and then for new ones, in order, until the step's token budget is used up.

        Prompts that end within half of the budget come first, and long ones keep the other half: a prompt of 500 tokens
        does not wait for the end of one of 100,000, and does not stop it.
        """
        budget, kept = self._chunk_tokens, 0
        lasting = [seq for seq in self._prefilling if self._lasts(seq)]
        if lasting:
            kept = budget // 2
        budget -= kept
        for seq in list(self._prefilling):
            if not self._lasts(seq):
                budget -= self._take_own(plan, seq, budget)
        self._blocked = False
        while (head := self.requests.waiting.head()) and self._admit_head(head, budget):
            if head.phase is not Phase.RUNNING or head.filling:
                continue
            self._joined.append(head)
            if self._lasts(head):
                lasting.append(head)
                kept += budget
                budget = 0
            else:
                budget -= self._take_own(plan, head, budget)
        budget += kept
        for seq in lasting:
            budget -= self._take_own(plan, seq, budget)
        self._take_shared(plan)

    def _lasts(self, seq: Sequence) -> bool:
        """Whether more than half of a step's tokens are left of its prompt, which this replica computes alone."""
        left = len(seq.tokens) - seq.num_computed
        return not seq.filling and not self._is_long(seq) and left > self._chunk_tokens // 2

    @abc.abstractmethod
    def _admit_head(self, seq: Sequence, budget: int) -> bool:
        """Take `seq` off the queue, if there is room for it. `budget`: tokens that this step can compute."""

    def _run(self, seq: Sequence, num_offered: int = 0) -> None:
        """Start to compute the prompt of a sequence that has pages. What the host tier has of the rest comes first, if
        with it there are as many pages as somebody else offers.
        """
        self.pages.run(seq)
        self._prefilling[seq] = None
        size, own = self.pages.size, seq.num_computed // self.pages.size
        if self.host.total:
            blocks = seq.page_hashes((len(seq.tokens) - 1) // size, size)[own:]
            pages, least = seq.pages[own:], max(num_offered - own, 1)
            if self.host.fill(pages, blocks, least, lambda count: self._filled(seq, own + count, from_host=True)):
                self._fill(seq)

    def _fill(self, seq: Sequence) -> None:
        """Somebody else will write leading pages of `seq`, which has just begun to run."""
        seq.filling = True
        seq.inflight += 1

    def _filled(self, seq: Sequence, num_pages: int, from_host: bool = False) -> None:
        """The fill is over, and nobody writes to the pages any more. The first `num_pages`, all full, have their KV: at
        least those of the prefix cache, and at least one token is left to compute.
        """
        assert seq.filling and num_pages * self.pages.size < len(seq.tokens), f"request {seq.id}, {num_pages} pages"
        seq.filling = False
        seq.inflight -= 1
        if seq.phase is not Phase.RUNNING:
            self._settle(seq)
            return
        if num_pages * self.pages.size > seq.num_computed:
            seq.set_computed(num_pages * self.pages.size)
            seq.trust = Trust.UNPROVEN
            self.outbox.filled(seq, from_host)
        self._joined.append(seq)

    def _take_shared(self, plan: Plan) -> None:
        """Use the turn, and ask for the next one; after all other chunks."""
        long = [seq for seq in self._prefilling if self._is_long(seq)]
        if long and self.turn is not None and self.turn.mine:
            self._take_chunk(plan, long[0], self.turn.replicas * self.config.shared_tokens)
            plan.chunks[-1].shared = True
        plan.wants_turn = any(map(self._is_long, long))

    def _may_admit(self, budget: int) -> bool:
        """Whether the step has room for another prompt. One long prompt waits behind another one, not more."""
        long = sum(self._lasts(seq) or self._is_long(seq) for seq in self._prefilling)
        return budget > 0 and long < 2 and self.pages.has_slot()

    def _complete(self, plan: Plan) -> Plan | None:
        """None: nothing runs, and no prompt waits for its turn."""
        if plan.decode or plan.chunks:
            plan.joined = [seq for seq in self._joined if seq.phase is Phase.RUNNING and not seq.filling]
            self._joined = []
            self.outbox.counters["steps"] += 1
        elif not plan.wants_turn:
            return None
        return plan

    def _take_chunk(self, plan: Plan, seq: Sequence, budget: int) -> int:
        """Plan the next tokens of a prompt, at most `budget`. Returns their number."""
        start = seq.num_computed
        end = min(start + budget, len(seq.tokens))
        if end <= start:
            return 0
        seq.set_computed(end)
        seq.inflight += 1
        plan.chunks.append(Chunk(seq, start, end, samples=end == len(seq.tokens)))
        return end - start

    def _condemn(self, seq: Sequence, why: Failure) -> None:
        """A step found that a page of `seq` is wrong. It may have come from any tier."""
        seq.trust = Trust.CORRUPT
        self.host.disk.remove(seq.page_hashes(len(seq.tokens) // self.pages.size, self.pages.size))
        self._stop(seq, FinishReason.ERROR, why)

    def _stop(self, seq: Sequence, finish: FinishReason, error: Failure | None = None) -> None:
        """End a request in any phase but DONE."""
        self.outbox.output(seq, [], finish, error)
        self._take_off(seq)
        self._leave(seq, Phase.DONE)

    def _take_off(self, seq: Sequence) -> None:
        """Remove `seq` from every list of those that will be scheduled."""
        self.requests.waiting.discard(seq)
        self._prefilling.pop(seq, None)

    def _leave(self, seq: Sequence, phase: Phase) -> None:
        """`seq`, already taken off, goes to WAITING, HELD or DONE."""
        if phase is not Phase.WAITING and seq.phase is not Phase.HELD:
            self.requests.num_active -= 1
        seq.enter(phase)
        self._settle(seq)

    def _settle(self, seq: Sequence) -> None:
        """Free what a sequence that has left still holds, unless a launched step or a transfer uses it."""
        if seq.transfer is Transfer.READING:
            return
        if seq.inflight:
            self.leaving.add(seq)
        elif seq.phase is not Phase.WAITING or not self._save(seq):
            self._free(seq)

    def _save(self, seq: Sequence) -> bool:
        """Copy full pages of a preempted sequence to the host tier before they are given back. False: nothing to do."""
        full, size = seq.num_computed // self.pages.size, self.pages.size
        if not self.host.total or seq.trust is not Trust.PROVEN:
            return False

        def saved() -> None:
            seq.inflight -= 1
            if seq.phase is Phase.WAITING:
                self._free(seq)
            else:
                self._settle(seq)

        if not self.host.save(seq.pages[:full], seq.page_hashes(full, size), saved):
            return False
        seq.inflight += 1
        self.leaving.add(seq)
        return True

    def _free(self, seq: Sequence) -> None:
        self.leaving.discard(seq)
        self.pages.free_slot(seq)
        if seq.phase is Phase.HELD:
            self.pages.hold(seq)
            return
        self.pages.release(seq)
        if seq.phase is Phase.WAITING:
            self.requests.waiting.push(seq)
        else:
            del self.requests.live[seq.id]

    def _load(self, running: int, importing: int, exporting: int) -> Load:
        pool, requests = self.pages.cache.pool, self.requests
        begun = sum(len(seq.tokens) - seq.num_computed for seq in self._prefilling)
        return Load(
            running=running,
            waiting=requests.num_waiting,
            importing=importing,
            exporting=exporting,
            waiting_tokens=requests.waiting.num_tokens + begun,
            begun_tokens=begun,
            pages_total=pool.total,
            pages_free=pool.num_free,
            pages_cached=pool.num_cached,
            pages_published=pool.num_published,
            pages_running=pool.num_running,
            drafted=tuple(self.outbox.drafts.drafted[: self.config.draft_tokens]),
            accepted=tuple(self.outbox.drafts.accepted[: self.config.draft_tokens]),
            capacity=0 if self._blocked else max(requests.room(), 0),
            host_pages_total=self.host.total,
            host_pages_used=self.host.used,
            counters=self.outbox.counters.copy(),
        )
