"""Who runs next on a prefill worker.

Life of an EXPORT request:
    1. Submit            WAITING, in the queue
    2. schedule          RUNNING: a slot, and pages for the whole prompt; what the cache had is published at once, if
                         only as a part without pages: the decode worker reserves its own while this one computes
    3. commit            after each chunk its finished pages are published
    4. last commit       the first token goes out, with the last part; PARKED
    5. LeaseEnded        the pages are free
Abort or deadline: nothing published -> DONE, pages free; something published -> PARKED until LeaseEnded.
LeaseEnded before 4: nobody will read the rest, so the request ends in an error.
"""

from __future__ import annotations

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
    TokenOutput,
)
from millrace_serve.engine.schedule.plan import Chunk, Plan, StepOutput
from millrace_serve.engine.schedule.roster import Roster
from millrace_serve.engine.schedule.sequence import Phase, Sequence


class PrefillScheduler:
    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self._running: dict[Sequence, None] = {}  # in order of admission
        self._num_parked = 0

    def handle(self, msg: EngineInput) -> None:
        match msg:
            case Submit(request):
                if seq := self.roster.enrol(request):
                    self.roster.waiting.push(seq)
            case Abort(id):
                seq = self.roster.live.get(id)
                if seq is not None and seq.phase in (Phase.WAITING, Phase.RUNNING):
                    self._stop(seq, FinishReason.ABORT)
            case LeaseEnded(id):
                if seq := self.roster.live.get(id):
                    self._end_lease(seq)
            case FlushCache():
                self.roster.cache.flush()
            case _:
                raise TypeError(f"a prefill engine does not take {type(msg).__name__}")

    def schedule(self) -> Plan | None:
        """Chunks for the admitted prompts in order, then new prompts, until the step's token budget is used up."""
        for seq in self.roster.expired():
            message = f"timeout_s={seq.request.timeout_s} passed during prefill"
            self._stop(seq, FinishReason.ERROR, Failure("DEADLINE_EXCEEDED", message))
        budget = self.roster.config.max_prefill_tokens
        plan = Plan([], [])
        for seq in self._running:
            budget -= self._take_chunk(plan, seq, budget)
        self.roster.blocked = False
        while budget > 0 and (admitted := self._admit_head()):
            plan.joined.append(admitted)
            budget -= self._take_chunk(plan, admitted, budget)
        if not plan.chunks:
            return None
        self.roster.totals["steps"] += 1
        return plan

    def commit(self, plan: Plan, output: StepOutput) -> None:
        tokens = output.tokens.tolist()
        row = 0
        for index, chunk in enumerate(plan.chunks):
            seq = chunk.seq
            seq.inflight -= 1
            if seq.phase is not Phase.RUNNING:
                self.roster.settle(seq)
            elif index in output.corrupt:
                seq.corrupt = True
                self._stop(seq, FinishReason.ERROR, Failure("KV_MISMATCH", output.corrupt[index]))
            else:
                self._advance(chunk, output.token(row, tokens[row], seq.request.sampling) if chunk.samples else None)
            row += chunk.samples

    def load(self) -> Load:
        return self.roster.load(len(self._running), importing=0, exporting=self._num_parked)

    def _admit_head(self) -> Sequence | None:
        roster = self.roster
        seq = roster.waiting.head()
        if seq is None or not roster.has_slot():
            return None
        pool, config = roster.cache.pool, roster.config
        held = pool.num_running + pool.num_published
        if held and config.max_parked_pages and held + roster.pages_for(len(seq.tokens)) > config.max_parked_pages:
            roster.blocked = True
            return None
        at_least_one_token = (len(seq.tokens) - 1) // config.page_size
        if not roster.take_pages(seq, len(seq.tokens), at_least_one_token, headroom=0):
            return None
        roster.waiting.discard(seq)
        roster.run(seq)
        self._running[seq] = None
        self._publish(seq, seq.num_scheduled // config.page_size)
        return seq

    def _take_chunk(self, plan: Plan, seq: Sequence, budget: int) -> int:
        if budget <= 0 or seq.num_scheduled == len(seq.tokens):
            return 0
        chunk = self.roster.next_chunk(seq, budget)
        plan.chunks.append(chunk)
        return chunk.end - chunk.start

    def _advance(self, chunk: Chunk, token: TokenOutput | None) -> None:
        """A chunk's KV is in its pages: make them known, and end the request if its prompt is complete."""
        seq, full = chunk.seq, chunk.end // self.roster.config.page_size
        assert seq.prefix is not None
        self.roster.cache.insert(seq.prefix, seq.tokens, seq.pages[:full], seq.prompt_hashes)
        if token is None:
            if full > seq.num_published:
                self._publish(seq, full)
            return
        seq.tokens.append(token.token_id)
        first = self.roster.say(seq, [token], seq.finish_of(token.token_id))
        self._publish(seq, len(seq.pages), first)
        del self._running[seq]
        self._park(seq)

    def _publish(self, seq: Sequence, num_pages: int, first: SequenceOutput | None = None) -> None:
        """Announce pages[num_published : num_pages]; with `first`, as the last part. There may be no pages in it."""
        span = slice(seq.num_published, num_pages)
        pages, hashes = seq.pages[span], seq.prompt_hashes[span]
        num_tokens = min(num_pages * self.roster.config.page_size, len(seq.request.token_ids))
        self.roster.cache.publish(pages)
        part = KvPart(seq.id, seq.num_published, pages, hashes, num_tokens, first is not None, first)
        self.roster.parts.append(part)
        seq.num_published = num_pages

    def _stop(self, seq: Sequence, finish: FinishReason, error: Failure | None = None) -> None:
        """End a WAITING or RUNNING request early."""
        self.roster.say(seq, [], finish, error)
        self.roster.waiting.discard(seq)
        self._running.pop(seq, None)
        if seq.num_published:
            self._park(seq)
        else:
            self.roster.leave(seq, Phase.DONE)

    def _park(self, seq: Sequence) -> None:
        self._num_parked += 1
        self.roster.leave(seq, Phase.PARKED)

    def _end_lease(self, seq: Sequence) -> None:
        if seq.phase in (Phase.WAITING, Phase.RUNNING):
            message = "the lease ended before the prompt was computed"
            self._stop(seq, FinishReason.ERROR, Failure("KV_EXPIRED", message))
        if seq.phase is Phase.PARKED:
            self._num_parked -= 1
            self.roster.unpark(seq)
