"""Who runs next on a decode or unified worker.

Life of an IMPORT request:                               Life of a LOCAL request:
    1. Submit       EXPECTED                                 1. Submit      WAITING, in the queue
    2. KvOffered    WAITING, in the queue                    2. schedule    RUNNING: a slot, pages for the whole prompt;
    3. schedule     IMPORTING: pages reserved                               chunks of it share each step with decoding
    4. KvArrived    READY (or DONE: its first token was      3. commit      first token; it decodes from now on
                    the last one)
    5. schedule     RUNNING, decoding
Then both grow by one token a step. Without a free page for it, the sequence that goes last (lowest priority, latest
arrival) is preempted: it returns to the queue without pages and is recomputed here from prompt and outputs, whatever
its route was. Abort or deadline: DONE; pages of an IMPORTING request stay until KvArrived or KvFailed says that the
transfer is over.
"""

from __future__ import annotations

from millrace_serve.engine.core import (
    Abort,
    EngineInput,
    Failure,
    FinishReason,
    FlushCache,
    KvArrived,
    KvFailed,
    KvOffered,
    KvReserved,
    Load,
    Request,
    SequenceOutput,
    Submit,
    TokenOutput,
)
from millrace_serve.engine.schedule.plan import Plan, StepOutput
from millrace_serve.engine.schedule.roster import Roster
from millrace_serve.engine.schedule.sequence import Phase, Sequence


class DecodeScheduler:
    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self._importing: set[Sequence] = set()  # a transfer into their pages may be in flight, even if they are DONE
        self._ready: dict[Sequence, None] = {}
        self._prefilling: dict[Sequence, None] = {}
        self._decoding: dict[Sequence, None] = {}
        self._joined: list[Sequence] = []  # got a slot, and no plan has said so yet

    # ------------------------------------------------------------------------------------------ messages

    def handle(self, msg: EngineInput) -> None:
        match msg:
            case Submit(request):
                self._submit(request)
            case Abort(id):
                if (seq := self.roster.live.get(id)) and seq.phase is not Phase.DONE:
                    self._stop(seq, FinishReason.ABORT)
            case KvOffered(id):
                if (seq := self.roster.live.get(id)) and seq.phase is Phase.EXPECTED:
                    seq.enter(Phase.WAITING)
                    self.roster.waiting.push(seq)
            case KvArrived(id, first):
                if (seq := self.roster.live.get(id)) and seq.imports:
                    self._arrived(seq, first)
            case KvFailed(id, failure):
                if (seq := self.roster.live.get(id)) and seq.imports:
                    self._failed(seq, failure)
            case FlushCache():
                self.roster.cache.flush()
            case _:
                raise TypeError(f"a decode engine does not take {type(msg).__name__}")

    def _submit(self, request: Request) -> None:
        seq = self.roster.enrol(request)
        if seq is not None and not seq.imports:
            self.roster.waiting.push(seq)

    def _arrived(self, seq: Sequence, first: SequenceOutput) -> None:
        self._end_transfer(seq)
        if seq.phase is Phase.DONE:
            self.roster.settle(seq)
            return
        held = seq.phase is Phase.IMPORTING
        seq.tokens += [token.token_id for token in first.tokens]
        finish = first.finish or (FinishReason.LENGTH if len(seq.tokens) >= seq.limit else None)
        if finish is not None:
            self._stop(seq, finish)
        elif seq.grammar is not None and (refused := seq.grammar.accept(t.token_id for t in first.tokens)):
            self._stop(seq, FinishReason.ERROR, refused)
        elif held:
            seq.imports = False
            seq.trusted = False
            seq.num_scheduled = len(seq.request.token_ids)
            seq.enter(Phase.READY)
            self._ready[seq] = None
        else:
            self._stop(seq, FinishReason.ERROR, Failure("INTERNAL", "KV arrived before pages were reserved for it"))

    def _failed(self, seq: Sequence, failure: Failure) -> None:
        self._end_transfer(seq)
        if seq.phase is Phase.DONE:
            self.roster.settle(seq)
        else:
            self._stop(seq, FinishReason.ERROR, failure)

    def _end_transfer(self, seq: Sequence) -> None:
        seq.in_transfer = False
        self._importing.discard(seq)

    def _stop(self, seq: Sequence, finish: FinishReason, error: Failure | None = None) -> None:
        """End a request in any phase but DONE."""
        self.roster.say(seq, [], finish, error)
        self._take_off(seq)
        self.roster.leave(seq, Phase.DONE)

    def _take_off(self, seq: Sequence) -> None:
        self.roster.waiting.discard(seq)
        for group in (self._ready, self._prefilling, self._decoding):
            group.pop(seq, None)

    # ------------------------------------------------------------------------------------------ scheduling

    def schedule(self) -> Plan | None:
        """One token for every decoding sequence that has a page for it, and prompt chunks up to the step's budget.
        Whoever is undecided sits this step out.
        """
        for seq in self.roster.expired():
            message = f"timeout_s={seq.request.timeout_s} passed"
            self._stop(seq, FinishReason.ERROR, Failure("DEADLINE_EXCEEDED", message))
        plan = Plan([], [])
        self._join_ready()
        self._grow(plan)
        self._take_decodes(plan)
        self._take_chunks(plan)
        if not plan.decode and not plan.chunks:
            return None
        plan.joined = [seq for seq in self._joined if seq.phase is Phase.RUNNING]
        self._joined = []
        self.roster.totals["steps"] += 1
        return plan

    def _join_ready(self) -> None:
        while self._ready and self.roster.has_slot():
            seq = min(self._ready, key=_order)
            del self._ready[seq]
            self.roster.run(seq)
            self._decoding[seq] = None
            self._joined.append(seq)

    def _grow(self, plan: Plan) -> None:
        """A page for each decoding sequence whose next token needs one. Those that get none sit this step out."""
        size = self.roster.config.page_size
        need = [
            seq
            for seq in self._decoding
            if seq.num_scheduled == len(seq.pages) * size and seq.num_scheduled + 1 < seq.limit and not seq.undecided
        ]
        if not need:
            return
        cache = self.roster.cache
        while cache.available < len(need) and not self.roster.leaving:
            victim = max((*self._ready, *self._prefilling, *self._decoding), key=_order)
            self._preempt(victim)
            need = [seq for seq in need if seq is not victim]
        if cache.available < len(need):
            need = sorted(need, key=_order)[: cache.available]
        for seq, page in zip(need, cache.allocate(len(need)) or (), strict=True):
            seq.pages.append(page)
        plan.grown = need

    def _preempt(self, seq: Sequence) -> None:
        self._take_off(seq)
        self.roster.totals["preemptions"] += 1
        self.roster.leave(seq, Phase.WAITING)

    def _take_decodes(self, plan: Plan) -> None:
        size, decode = self.roster.config.page_size, plan.decode
        for seq in self._decoding:
            position = seq.num_scheduled
            if position + 1 < seq.limit and position < len(seq.pages) * size and not seq.undecided:
                seq.num_scheduled = position + 1
                seq.inflight += 1
                decode.append(seq)

    def _take_chunks(self, plan: Plan) -> None:
        budget = self.roster.config.max_prefill_tokens
        for running in list(self._prefilling):
            budget -= self._take_chunk(plan, running, budget)
        self.roster.blocked = False
        while (seq := self.roster.waiting.head()) and (budget > 0 or seq.imports) and self._admit(seq):
            if not seq.imports:
                self._joined.append(seq)
                budget -= self._take_chunk(plan, seq, budget)

    def _take_chunk(self, plan: Plan, seq: Sequence, budget: int) -> int:
        if budget <= 0:
            return 0
        chunk = self.roster.next_chunk(seq, budget)
        plan.chunks.append(chunk)
        if chunk.samples:
            del self._prefilling[seq]
            self._decoding[seq] = None
        return chunk.end - chunk.start

    def _admit(self, seq: Sequence) -> bool:
        """Pages for the head of the queue, which leaves it. One page stays back for each sequence that is decoding."""
        roster, length, size = self.roster, len(seq.tokens), self.roster.config.page_size
        if seq.imports:
            if not roster.take_pages(seq, length, length // size, headroom=len(self._decoding)):
                return False
            roster.waiting.discard(seq)
            self._reserve(seq)
            return True
        at_least_one_token = (length - 1) // size
        if not roster.has_slot() or not roster.take_pages(seq, length, at_least_one_token, len(self._decoding)):
            return False
        roster.waiting.discard(seq)
        roster.run(seq)
        self._prefilling[seq] = None
        return True

    def _reserve(self, seq: Sequence) -> None:
        seq.enter(Phase.IMPORTING)
        seq.in_transfer = True
        self._importing.add(seq)
        cached = seq.num_scheduled // self.roster.config.page_size
        self.roster.reserved.append(KvReserved(seq.id, list(seq.pages), cached))

    # ------------------------------------------------------------------------------------------ results

    def commit(self, plan: Plan, output: StepOutput) -> None:
        """Row s of `output` belongs to the s-th sampling sequence of `plan`."""
        tokens = output.tokens.tolist()
        for row, seq in enumerate(plan.decode):
            self._take_result(seq, row, row, tokens, output)
        row = len(plan.decode)
        for index, chunk in enumerate(plan.chunks, start=row):
            self._take_result(chunk.seq, index, row if chunk.samples else -1, tokens, output)
            row += chunk.samples

    def _take_result(self, seq: Sequence, index: int, row: int, tokens: list[int], output: StepOutput) -> None:
        """`row` is -1 for a chunk that sampled nothing. A preempted sequence (WAITING) still takes its token."""
        seq.inflight -= 1
        if output.corrupt and index in output.corrupt and seq.phase is not Phase.DONE:
            seq.corrupt = True
            self._stop(seq, FinishReason.ERROR, Failure("KV_MISMATCH", output.corrupt[index]))
        elif row >= 0 and seq.phase is not Phase.DONE:
            self._append(seq, output.token(row, tokens[row], seq.request.sampling))
        if seq.phase is not Phase.RUNNING and not seq.inflight and seq in self.roster.leaving:
            self.roster.settle(seq)

    def _append(self, seq: Sequence, token: TokenOutput) -> None:
        seq.trusted = True
        if seq.silent and seq.phase is Phase.RUNNING:
            self._share_prompt(seq)
        seq.tokens.append(token.token_id)
        finish = seq.finish_of(token.token_id)
        self.roster.say(seq, [token], finish)
        if finish is not None:
            self._take_off(seq)
            self.roster.leave(seq, Phase.DONE)
        elif seq.grammar is not None and (refused := seq.grammar.accept((token.token_id,))):
            self._stop(seq, FinishReason.ERROR, refused)

    def _share_prompt(self, seq: Sequence) -> None:
        assert seq.prefix is not None
        prompt = seq.request.token_ids
        full = len(prompt) // self.roster.config.page_size
        self.roster.cache.insert(seq.prefix, prompt, seq.pages[:full], seq.prompt_hashes)

    def load(self) -> Load:
        running = len(self._prefilling) + len(self._decoding)
        return self.roster.load(running, importing=len(self._importing) + len(self._ready), exporting=0)


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order
