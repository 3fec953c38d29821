"""The scheduler of a prefill worker.

Life of an EXPORT request:
    1. Submit            WAITING, in the queue
    2. schedule          RUNNING: a slot, and pages for the whole prompt; cached pages are published at once, if
                         only as a part without pages: the decode worker reserves its own while this one computes
    3. commit            after each chunk its finished pages are published
    4. last commit       the first token goes out, with the last part; PARKED
    5. LeaseEnded        the pages are free
Abort or deadline: nothing published -> DONE, pages free; something published -> PARKED until LeaseEnded.
LeaseEnded before 4: no worker will read the rest, so the request ends in an error.
"""

from __future__ import annotations

from millrace_common.reasons import Reason

from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.core import (
    Abort,
    EngineInput,
    Failure,
    FinishReason,
    FlushCache,
    KvPart,
    LeaseEnded,
    Load,
    SequenceOutput,
    Submit,
)
from millrace_serve.engine.schedule.pages import Pages
from millrace_serve.engine.schedule.plan import Chunk, Plan, StepOutput
from millrace_serve.engine.schedule.requests import Requests
from millrace_serve.engine.schedule.scheduler import Scheduler
from millrace_serve.engine.schedule.sequence import Phase, Sequence, Trust


class PrefillScheduler(Scheduler):
    def __init__(self, config: EngineConfig, requests: Requests, pages: Pages) -> None:
        super().__init__(config, requests, pages)
        self._running: dict[Sequence, None] = {}  # in order of admission
        self._num_parked = 0

    def handle(self, msg: EngineInput) -> None:
        live = self.requests.live
        match msg:
            case Submit(request):
                if seq := self._enrol(request):
                    self.requests.waiting.push(seq)
            case Abort(id):
                seq = live.get(id)
                if seq is not None and seq.phase in (Phase.WAITING, Phase.RUNNING):
                    self._stop(seq, FinishReason.ABORT)
            case LeaseEnded(id):
                if seq := live.get(id):
                    self._end_lease(seq)
            case FlushCache():
                self.pages.cache.flush()
            case _:
                raise TypeError(f"a prefill engine does not take {type(msg).__name__}")

    def schedule(self) -> Plan | None:
        """Chunks for the admitted prompts in order, then new prompts, until the step's token budget is used up."""
        for seq in self.requests.expired():
            message = f"timeout_s={seq.request.timeout_s} passed during prefill"
            self._stop(seq, FinishReason.ERROR, Failure(Reason.DEADLINE_EXCEEDED, message))
        budget = self.config.max_prefill_tokens
        plan = Plan([], [])
        for seq in self._running:
            budget -= self._take_chunk(plan, seq, budget)
        self._blocked = False
        while budget > 0 and (admitted := self._admit_head()):
            plan.joined.append(admitted)
            budget -= self._take_chunk(plan, admitted, budget)
        if not plan.chunks:
            return None
        self.outbox.totals["steps"] += 1
        return plan

    def commit(self, plan: Plan, output: StepOutput) -> None:
        tokens, row = output.accepted(), 0
        for index, chunk in enumerate(plan.chunks):
            seq = chunk.seq
            seq.inflight -= 1
            if seq.phase is not Phase.RUNNING:
                self._settle(seq)
            elif index in output.corrupt:
                seq.trust = Trust.CORRUPT
                self._stop(seq, FinishReason.ERROR, Failure(Reason.KV_MISMATCH, output.corrupt[index]))
            else:
                self._share(chunk)
                if chunk.samples:
                    self._finish(seq, row, tokens[row], output)
            row += chunk.samples

    def load(self) -> Load:
        return self._load(len(self._running), importing=0, exporting=self._num_parked)

    def _admit_head(self) -> Sequence | None:
        seq = self.requests.waiting.head()
        if seq is None or not self.pages.has_slot():
            return None
        pool, most = self.pages.cache.pool, self.config.max_parked_pages
        held = pool.num_running + pool.num_published
        if held and most and held + self.pages.count(len(seq.tokens)) > most:
            self._blocked = True
            return None
        at_least_one_token = (len(seq.tokens) - 1) // self.pages.size
        if not self._admit(seq, at_least_one_token, headroom=0):
            return None
        self.pages.run(seq)
        self._running[seq] = None
        self._publish(seq, seq.num_computed // self.pages.size)
        return seq

    def _share(self, chunk: Chunk) -> None:
        """The chunk's KV is in its pages: put the full ones into the prefix cache, and publish them."""
        seq, full = chunk.seq, chunk.end // self.pages.size
        assert seq.prefix is not None
        self.pages.cache.insert(seq.prefix, seq.tokens, seq.pages[:full], seq.prompt_hashes)
        if not chunk.samples and full > seq.num_published:
            self._publish(seq, full)

    def _finish(self, seq: Sequence, row: int, tokens: list[int], output: StepOutput) -> None:
        """The prompt is complete: its first token goes out with the last part."""
        _, finish = seq.extend(tokens)
        first = self.outbox.output(seq, output.outputs(row, tokens, seq), finish)
        self._publish(seq, len(seq.pages), first, output.drafts_of(row))
        del self._running[seq]
        self._leave(seq, Phase.PARKED)

    def _publish(
        self, seq: Sequence, num_pages: int, first: SequenceOutput | None = None, drafts: tuple[int, ...] = ()
    ) -> None:
        """Announce pages[num_published : num_pages]; with `first`, as the last part. There may be no pages in it."""
        span = slice(seq.num_published, num_pages)
        pages, hashes = seq.pages[span], seq.prompt_hashes[span]
        num_tokens = min(num_pages * self.pages.size, len(seq.request.token_ids))
        self.pages.cache.publish(pages)
        part = KvPart(seq.id, seq.num_published, pages, hashes, num_tokens, first is not None, first, drafts)
        self.outbox.events.parts.append(part)
        seq.num_published = num_pages

    def _take_off(self, seq: Sequence) -> None:
        self.requests.waiting.discard(seq)
        self._running.pop(seq, None)

    def _leave(self, seq: Sequence, phase: Phase) -> None:
        """A prompt of which a decode worker may read pages stays until its lease ends."""
        if phase is Phase.DONE and seq.num_published:
            phase = Phase.PARKED
        self._num_parked += phase is Phase.PARKED
        super()._leave(seq, phase)

    def _end_lease(self, seq: Sequence) -> None:
        if seq.phase in (Phase.WAITING, Phase.RUNNING):
            message = "the lease ended before the prompt was computed"
            self._stop(seq, FinishReason.ERROR, Failure(Reason.KV_EXPIRED, message))
        if seq.phase is not Phase.PARKED:
            return
        self._num_parked -= 1
        seq.enter(Phase.DONE)
        if seq.inflight:  # aborted an instant ago: the commit of its last step frees its pages
            self.pages.unpublish(seq)
        else:
            self.pages.unpark(seq)
            del self.requests.live[seq.id]
