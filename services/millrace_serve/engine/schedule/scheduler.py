"""The interface of a scheduler, and the common part of both: how a sequence leaves.

A sequence that leaves (finished, preempted, parked) gives its slot and pages back at once when no launched step names
it, otherwise with the commit of the last such step. Only then may another sequence have them.
"""

from __future__ import annotations

import abc

from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.core import EngineInput, Events, Failure, FinishReason, Load, Request
from millrace_serve.engine.schedule.outbox import Outbox
from millrace_serve.engine.schedule.pages import Pages
from millrace_serve.engine.schedule.plan import Chunk, Plan, StepOutput
from millrace_serve.engine.schedule.requests import Requests
from millrace_serve.engine.schedule.sequence import Phase, Sequence, Transfer


class Scheduler(abc.ABC):
    def __init__(self, config: EngineConfig, requests: Requests, pages: Pages) -> None:
        self.config, self.requests, self.pages = config, requests, pages
        self.outbox = Outbox()
        self.leaving: set[Sequence] = set()  # have left, but a launched step still names them
        self._blocked = False  # the head of the queue lacked pages when it was last tried

    @abc.abstractmethod
    def handle(self, msg: EngineInput) -> None:
        """Never raises for a bad request: the request ends in an output with finish ERROR."""

    @abc.abstractmethod
    def schedule(self) -> Plan | None:
        """The next step; None: nothing can run."""

    @abc.abstractmethod
    def commit(self, plan: Plan, output: StepOutput) -> None:
        """Take the results of the oldest launched step."""

    @abc.abstractmethod
    def load(self) -> Load: ...

    def take_events(self) -> Events:
        events = self.outbox.take()
        events.cache = self.pages.cache.take_changes()
        return events

    def _enrol(self, request: Request) -> Sequence | None:
        """The request's sequence, in no queue yet; None when the request was refused."""
        enrolled = self.requests.enrol(request)
        if isinstance(enrolled, Failure):
            self.outbox.refuse(request, enrolled)
            return None
        return enrolled

    def _admit(self, seq: Sequence, max_cached_pages: int, headroom: int) -> bool:
        """Pages for the head of the queue, which leaves it."""
        if not self.pages.take(seq, max_cached_pages, headroom):
            self._blocked = True
            return False
        self.outbox.admitted(seq, self.requests.clock())
        self.requests.waiting.discard(seq)
        return True

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

    def _stop(self, seq: Sequence, finish: FinishReason, error: Failure | None = None) -> None:
        """End a request in any phase but DONE."""
        self.outbox.output(seq, [], finish, error)
        self._take_off(seq)
        self._leave(seq, Phase.DONE)

    @abc.abstractmethod
    def _take_off(self, seq: Sequence) -> None:
        """Remove `seq` from every list of those that will be scheduled."""

    def _leave(self, seq: Sequence, phase: Phase) -> None:
        """`seq`, already taken off, goes to WAITING, PARKED or DONE."""
        if phase is not Phase.WAITING and seq.phase is not Phase.PARKED:
            self.requests.num_active -= 1
        seq.enter(phase)
        self._settle(seq)

    def _settle(self, seq: Sequence) -> None:
        """Free what a sequence that has left still holds, unless a launched step or a transfer uses it."""
        if seq.transfer is Transfer.READING:
            return
        if seq.inflight:
            self.leaving.add(seq)
            return
        self.leaving.discard(seq)
        self.pages.free_slot(seq)
        if seq.phase is Phase.PARKED:
            self.pages.park(seq)
            return
        self.pages.release(seq)
        if seq.phase is Phase.WAITING:
            self.requests.waiting.push(seq)
        else:
            del self.requests.live[seq.id]

    def _load(self, running: int, importing: int, exporting: int) -> Load:
        pool, requests = self.pages.cache.pool, self.requests
        return Load(
            running=running,
            waiting=requests.num_waiting,
            importing=importing,
            exporting=exporting,
            waiting_tokens=requests.waiting.num_tokens,
            pages_total=pool.total,
            pages_free=pool.num_free,
            pages_cached=pool.num_cached,
            pages_published=pool.num_published,
            pages_running=pool.num_running,
            drafted=tuple(self.outbox.drafted[: self.config.draft_tokens]),
            accepted=tuple(self.outbox.accepted[: self.config.draft_tokens]),
            credits=0 if self._blocked else max(requests.room(), 0),
            **self.outbox.totals,
        )
