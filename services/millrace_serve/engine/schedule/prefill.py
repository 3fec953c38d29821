"""The scheduler of a prefill worker.

Life of an EXPORT request:
    1. Submit            WAITING, in the queue
    2. schedule          RUNNING: a slot, and pages for the whole prompt; cached pages are published at once, if
                         only as a chunk without pages: the decode worker reserves its own while this one computes
    3. commit            after each chunk its finished pages are published
    4. last commit       the first token goes out, with the last chunk; HELD
    5. LeaseEnded        the pages are free
A request that fetches is EXPECTED until KvOffered says what another worker serves, or KvFailed that nobody does. If
that is more than our prefix cache has, 2 begins a fill (scheduler.py), and cached pages are published when it is over:
KvArrived; or KvFailed, and the pages are computed here. KvLate: they may be written for as long as a lost worker likes,
so the request gives them up and returns to the queue.
Abort or deadline: nothing published -> DONE, pages free; something published -> HELD until LeaseEnded.
LeaseEnded before 4: no worker will read the rest, so the request ends in an error.
"""

from __future__ import annotations

import msgspec
from millrace_common.rate import Rate
from millrace_common.reasons import Reason

from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.core import (
    Abort,
    Failure,
    FinishReason,
    KvArrived,
    KvChunk,
    KvFailed,
    KvLate,
    KvOffered,
    KvReserved,
    LeaseEnded,
    Load,
    SchedulerInput,
    SequenceOutput,
)
from millrace_serve.engine.schedule.pages import Pages
from millrace_serve.engine.schedule.plan import Plan, StepOutput
from millrace_serve.engine.schedule.requests import EngineRequests
from millrace_serve.engine.schedule.scheduler import Scheduler
from millrace_serve.engine.schedule.sequence import Phase, Sequence, Trust

# Of computing, that routers may let wait here. It only has to last from one report to the next, also where most of the
# prompts turn out to be cached; the rest waits in the routers' fair queues.
QUEUE_S = 4.0


class PrefillScheduler(Scheduler):
    def __init__(self, config: EngineConfig, requests: EngineRequests, pages: Pages) -> None:
        super().__init__(config, requests, pages)
        self._num_held = 0
        self._speed = Rate()  # prompt tokens
        self._committed_at = 0.0

    def handle(self, msg: SchedulerInput) -> None:
        live = self.requests.live
        match msg:
            case Abort(id):
                if (seq := live.get(id)) and seq.phase not in (Phase.HELD, Phase.DONE):
                    self._stop(seq, FinishReason.ABORT)
            case KvOffered(id, num_pages):
                if (seq := live.get(id)) and seq.phase is Phase.EXPECTED:
                    self._queue(seq, num_pages)
            case KvArrived(id):
                if (seq := live.get(id)) and seq.num_offered:
                    self._end_fill(seq, seq.num_offered)
            case KvLate(id):
                if (seq := live.get(id)) and seq.num_offered and seq.phase is Phase.RUNNING:
                    self._do_without(seq)
            case KvFailed(id):
                self.served_pages.settle(id)
                if seq := live.get(id):
                    self._lose_prefix(seq)
            case LeaseEnded(id) if id in live:
                self._end_lease(live[id])
            case _:
                self._handle_alike(msg)

    def schedule(self) -> Plan | None:
        for seq in self.requests.expired():
            message = f"timeout_s={seq.request.timeout_s} passed during prefill"
            self._stop(seq, FinishReason.ERROR, Failure(Reason.DEADLINE_EXCEEDED, message))
        plan = Plan([], [], began=self.requests.clock())
        self._take_chunks(plan)
        return self._complete(plan)

    def commit(self, plan: Plan, output: StepOutput) -> None:
        tokens, row = output.accepted(), 0
        self._measure(plan)
        for index, chunk in enumerate(plan.chunks):
            seq = chunk.seq
            seq.inflight -= 1
            if seq.phase is not Phase.RUNNING:
                self._settle(seq)
            elif index in output.corrupt:
                self._condemn(seq, output.corrupt[index])
            else:
                seq.trust = Trust.PROVEN
                full = self.pages.share(seq, chunk.end)
                if chunk.samples:
                    self._finish(seq, row, tokens[row], output)
                elif full > seq.num_published:
                    self._publish(seq, full)
            row += chunk.samples

    def _measure(self, plan: Plan) -> None:
        """A launched step computes from the end of the one before it."""
        now = self.requests.clock()
        self._speed.add(
            sum(chunk.end - chunk.start for chunk in plan.chunks), now - max(plan.began, self._committed_at)
        )
        self._committed_at = now

    def load(self) -> Load:
        filling = sum(seq.filling for seq in self._prefilling)
        load = self._load(len(self._prefilling) - filling, importing=filling, exporting=self._num_held)
        speed = self._speed.per_s
        most = int(speed * QUEUE_S) if speed else load.pages_total * self.pages.size
        return msgspec.structs.replace(load, prompt_tokens_per_s=speed, room=most - load.waiting_tokens)

    def _admit_head(self, seq: Sequence, budget: int) -> bool:
        if not self._may_admit(budget):
            return False
        pool, most = self.pages.cache.pool, self.config.max_held_pages
        held = pool.num_running + pool.num_published
        if held and most and held + self.pages.count(len(seq.tokens)) > most:
            self._blocked = True
            return False
        at_least_one_token = (len(seq.tokens) - 1) // self.pages.size
        if not self._admit(seq, at_least_one_token, headroom=0):
            return False
        self._run(seq, seq.num_offered)
        own, from_host = seq.num_computed // self.pages.size, seq.filling
        if seq.num_offered:
            pages = seq.pages[: seq.num_offered]
            num_ours = len(pages) if from_host else min(own, len(pages))
            self.outbox.events.reserved.append(KvReserved(seq.id, pages, num_ours))
        if own < seq.num_offered and not from_host:
            self._fill(seq)
            self._publish(seq, 0)
        else:
            seq.num_offered = 0
            self._publish(seq, own)
        return True

    def _queue(self, seq: Sequence, num_offered: int) -> None:
        seq.enter(Phase.WAITING)
        seq.num_offered = num_offered
        self.requests.waiting.push(seq)

    def _end_fill(self, seq: Sequence, num_pages: int) -> None:
        """Of the sequence's pages `num_pages` have their KV, and no read is in flight."""
        seq.num_offered = 0
        self._filled(seq, num_pages)
        if seq.phase is Phase.RUNNING:
            self._publish(seq, num_pages)

    def _lose_prefix(self, seq: Sequence) -> None:
        if seq.phase is Phase.EXPECTED:
            self._queue(seq, 0)
        elif seq.num_offered and seq.filling:
            self._end_fill(seq, seq.num_computed // self.pages.size)
        seq.num_offered = 0

    def _do_without(self, seq: Sequence) -> None:
        """The pages that are being read are kept aside until KvFailed."""
        own, seq.num_offered = slice(seq.num_computed // self.pages.size, seq.num_offered), 0
        self.served_pages.set_aside(seq.id, seq.pages[own])
        self._take_off(seq)
        seq.preempted = True
        self._leave(seq, Phase.WAITING)
        self._filled(seq, 0)

    def _finish(self, seq: Sequence, row: int, tokens: list[int], output: StepOutput) -> None:
        """The prompt is complete: its first token goes out with the last chunk."""
        _, finish = seq.extend(tokens)
        first = self.outbox.output(seq, output.outputs(row, tokens, seq), finish)
        self._publish(seq, len(seq.pages), first, output.drafts_of(row))
        del self._prefilling[seq]
        self._leave(seq, Phase.HELD)

    def _publish(
        self, seq: Sequence, num_pages: int, first: SequenceOutput | None = None, drafts: tuple[int, ...] = ()
    ) -> None:
        """Announce pages[num_published : num_pages]; with `first`, as the last chunk. There may be no pages in it."""
        span = slice(seq.num_published, num_pages)
        pages, hashes = seq.pages[span], seq.prompt_hashes[span]
        num_tokens = min(num_pages * self.pages.size, len(seq.request.token_ids))
        self.pages.cache.publish(pages)
        chunk = KvChunk(seq.id, seq.num_published, pages, hashes, num_tokens, first is not None, first, drafts)
        self.outbox.events.chunks.append(chunk)
        seq.num_published = num_pages

    def _leave(self, seq: Sequence, phase: Phase) -> None:
        """A prompt of which a decode worker may read pages stays until its lease ends."""
        if phase is Phase.DONE and seq.num_published:
            phase = Phase.HELD
        self._num_held += phase is Phase.HELD
        super()._leave(seq, phase)

    def _end_lease(self, seq: Sequence) -> None:
        if seq.phase in (Phase.WAITING, Phase.RUNNING):
            message = "the lease ended before the prompt was computed"
            self._stop(seq, FinishReason.ERROR, Failure(Reason.KV_EXPIRED, message))
        if seq.phase is not Phase.HELD:
            return
        self._num_held -= 1
        seq.enter(Phase.DONE)
        if seq.inflight:  # aborted an instant ago: the commit of its last step frees its pages
            self.pages.unpublish(seq)
        else:
            self.pages.release_held(seq)
            del self.requests.live[seq.id]
