"""The scheduler of a replica. What happens to a request follows from its route; exports.py has the life of an EXPORT.

Life of an IMPORT request:                               Life of a LOCAL request:
    1. Submit       EXPECTED                                 1. Submit      WAITING, in the queue
    2. KvOffered    WAITING, in the queue                    2. schedule    RUNNING: a slot, pages for the whole prompt;
    3. schedule     IMPORTING: pages reserved                               chunks of it share each step with decoding
    4. KvArrived    READY (or DONE: its first token was      3. commit      first token; it decodes from now on
                    the last one)
    5. schedule     RUNNING, decoding
Then each step gives both up to 1 + draft_tokens rows: the last token and drafts of what follows it. The device accepts
one of them or more. The rows need pages; with pages for one row a sequence goes on, and the device accepts no
token beyond the sequence's capacity. Without a free page even for one row, the sequence that goes last (lowest
priority, latest arrival) is preempted: it returns to the queue without pages and is recomputed here from prompt and
outputs, whatever its route was, but for pages that the prefix cache has. No EXPORT is preempted. Abort or
deadline: DONE; pages of an IMPORTING request stay until KvArrived or KvFailed ends the transfer.
"""

from collections.abc import Iterator

from millrace_common.reasons import Reason
from millrace_common.step_times import StepTimes, chunk_pairs
from msgspec.structs import replace

from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import (
    Abort,
    Events,
    Failure,
    FinishReason,
    FlushCache,
    KvArrived,
    KvFailed,
    KvLate,
    KvOffered,
    KvReserved,
    LeaseEnded,
    Load,
    SchedulerInput,
    SequenceOutput,
    ServePrefix,
    Submit,
)
from millrace_serve.engine.drafts.counts import DraftCounts, usable
from millrace_serve.engine.schedule.capacity import ReplicaCapacity
from millrace_serve.engine.schedule.exports import Publisher
from millrace_serve.engine.schedule.pages import Pages
from millrace_serve.engine.schedule.plan import Chunk, Plan, StepOutput, Work
from millrace_serve.engine.schedule.requests import EngineRequests
from millrace_serve.engine.schedule.sequence import KvWriter, Phase, Sequence, Trust
from millrace_serve.engine.schedule.served_pages import ServedPages
from millrace_serve.engine.schedule.speeds import Speeds
from millrace_serve.engine.schedule.streams import Streams
from millrace_serve.engine.schedule.waiting import Waits

# Python 3.11 takes as long for a member of an enum as for a call
RUNNING, PROVEN = Phase.RUNNING, Trust.PROVEN
ENDED = (Phase.HELD, Phase.DONE)


class Scheduler(Streams):
    def __init__(
        self, config: EngineConfig, role: Role, requests: EngineRequests, pages: Pages, times: StepTimes
    ) -> None:
        """`times` of steps, until they have been measured."""
        super().__init__(config, requests, pages, Speeds(times))
        self.served_pages = ServedPages(pages.cache)
        self._publisher = Publisher(config, role, pages, self.outbox)
        self._capacity = ReplicaCapacity(config, role, requests, pages, self.outputs)
        self._waits = Waits()
        self._drafts = DraftCounts(config.draft_tokens)

    # ------------------------------------------------------------------------------------------ messages

    def handle(self, msg: SchedulerInput) -> None:
        """Never raises for a bad request: the request ends in an output with finish ERROR."""
        match msg:
            case Submit(request):
                enrolled = self.requests.enrol(request)
                if isinstance(enrolled, Failure):
                    self.outbox.refuse(request, enrolled)
                elif enrolled is not None and enrolled.phase is Phase.WAITING:
                    self._enqueue(enrolled)
            case ServePrefix(id, blocks):
                if self._publisher.needs_all(self.requests.waiting.head()):
                    blocks = []  # what others fetch would be held without an end, and it would wait as long
                self.outbox.events.chunks.append(self.served_pages.serve_prefix(id, blocks))
            case FlushCache():
                self.pages.cache.flush()
            case _:
                if isinstance(msg, KvFailed):
                    self.served_pages.settle(msg.id)
                elif isinstance(msg, LeaseEnded):
                    self.served_pages.end(msg.id)
                if seq := self.requests.live.get(msg.id):
                    self._handle_of(seq, msg)

    def _handle_of(self, seq: Sequence, msg: Abort | KvOffered | KvArrived | KvFailed | KvLate | LeaseEnded) -> None:
        """A message about a live sequence; one that its phase does not expect changes nothing."""
        match msg:
            case Abort() if seq.phase not in ENDED:
                self._stop(seq, FinishReason.ABORT)
            case KvOffered(_, num_pages) if seq.phase is Phase.EXPECTED:
                self._queue(seq, num_pages)
            case KvArrived(_, first) if seq.imports:
                assert first is not None, f"request {seq.id} arrived without a first token"
                self._arrived(seq, first)
            case KvFailed(_, failure) if seq.imports:
                self._failed(seq, failure)
            case KvArrived() if seq.num_offered:
                self._end_fill(seq, seq.num_offered)
            case KvFailed() if seq.exports:
                self._lose_prefix(seq)
            case KvLate() if seq.num_offered and seq.filling:
                self._do_without(seq)
            case LeaseEnded() if seq.exports:
                self._end_lease(seq)

    def _queue(self, seq: Sequence, num_offered: int) -> None:
        seq.enter(Phase.WAITING)
        seq.num_offered = num_offered
        self._enqueue(seq)

    # ------------------------------------------------------------------------------------------ imports

    def _reserve(self, seq: Sequence) -> None:
        seq.enter(Phase.IMPORTING)
        seq.kv = KvWriter.READING
        self._importing.add(seq)
        num_cached_pages = seq.num_computed // self.pages.size
        self.outbox.events.reserved.append(KvReserved(seq.id, list(seq.pages), num_cached_pages))

    def _arrived(self, seq: Sequence, first: SequenceOutput) -> None:
        self._end_transfer(seq)
        if seq.phase is Phase.DONE:
            self._settle(seq)
            return
        held = seq.phase is Phase.IMPORTING
        tokens = [token.token_id for token in first.tokens]
        seq.tokens.fromlist(tokens)
        seq.drafts = usable(first.drafts, self.requests.vocab_size)
        finish = first.finish or (FinishReason.LENGTH if len(seq.tokens) >= seq.limit else None)
        if finish is not None:
            self._stop(seq, finish)
        elif not held:
            message = "KV arrived before pages were reserved for it"
            self._stop(seq, FinishReason.ERROR, Failure(Reason.INTERNAL, message))
        elif seq.grammar is not None and (refused := seq.grammar.accept(tokens)):
            self._stop(seq, FinishReason.ERROR, refused)
        else:
            seq.trust = Trust.UNPROVEN
            seq.set_computed(len(seq.request.token_ids))
            seq.enter(Phase.READY)
            self._ready[seq] = None

    def _failed(self, seq: Sequence, failure: Failure) -> None:
        self._end_transfer(seq)
        if seq.phase is Phase.DONE:
            self._settle(seq)
        else:
            self._stop(seq, FinishReason.ERROR, failure)

    def _end_transfer(self, seq: Sequence) -> None:
        seq.kv = KvWriter.OWN
        self._importing.discard(seq)

    # ------------------------------------------------------------------------------------------ exports

    def _end_fill(self, seq: Sequence, num_pages: int) -> None:
        """Of the sequence's pages `num_pages` have their KV, and no read is in flight."""
        seq.num_offered = 0
        self._filled(seq, num_pages)
        if seq.phase is Phase.RUNNING:
            self._publisher.publish(seq, num_pages)

    def _lose_prefix(self, seq: Sequence) -> None:
        if seq.phase is Phase.EXPECTED:
            self._queue(seq, 0)
        elif seq.num_offered and seq.filling:
            self._end_fill(seq, seq.num_computed // self.pages.size)
        seq.num_offered = 0

    def _do_without(self, seq: Sequence) -> None:
        """The pages that are being read are kept aside until KvFailed. All else that the request has is free now."""
        own, seq.num_offered = slice(seq.num_computed // self.pages.size, seq.num_offered), 0
        self.served_pages.set_aside(seq.id, seq.pages[own])
        if seq.phase is Phase.RUNNING:  # else it has ended
            self._preempt(seq)
        self._filled(seq, 0)

    def _end_lease(self, seq: Sequence) -> None:
        if seq.phase in (Phase.WAITING, Phase.RUNNING):
            message = "the lease ended before the prompt was computed"
            self._stop(seq, FinishReason.ERROR, Failure(Reason.KV_EXPIRED, message))
        if seq.phase is Phase.HELD:
            self._end_parking(seq)

    # ------------------------------------------------------------------------------------------ scheduling

    def schedule(self) -> Plan | None:
        """The next step; None: nothing can run. Rows for every decoding sequence that has a page for one, and prompt
        chunks up to the step's budget. Behind an awaited plan: only once that was committed.
        """
        for seq in self.requests.expired():
            message = f"timeout_s={seq.request.timeout_s} passed"
            self._stop(seq, FinishReason.ERROR, Failure(Reason.DEADLINE_EXCEEDED, message))
        plan = Plan([], [], began=self.requests.clock())
        self._join_ready()
        self._grow(plan)
        self._take_decodes(plan)
        self._take_chunks(plan)
        return self._complete(plan)

    def _complete(self, plan: Plan) -> Plan | None:
        """None: nothing runs, and no prompt waits for its turn."""
        if plan.decode or plan.chunks:
            plan.work = self._work(plan)
            plan.awaited = any(seq.grammar is not None for seq in self._decoding)
            plan.joined = [seq for seq in self._joined if seq.phase is Phase.RUNNING and not seq.filling]
            self._joined = []
            self.outbox.counters["steps"] += 1
        elif not plan.wants_turn:
            return None
        return plan

    def _work(self, plan: Plan) -> Work:
        tokens, pairs = 0, 0.0
        for chunk in plan.chunks:
            tokens += chunk.end - chunk.start
            pairs += chunk_pairs(chunk.start, chunk.end - chunk.start)
        return plan.work._replace(tokens=tokens, pairs=pairs)

    # ------------------------------------------------------------------------------------------ admission

    def _has_turn(self, seq: Sequence, length_class: int) -> bool:
        """An export that waits for the end of leases lets others pass, whose reads may end them."""
        if seq.exports and not self._publisher.has_room(seq, self._prefilling):
            self._blocked = True
            return False
        return super()._has_turn(seq, length_class)

    def _admit_head(self, seq: Sequence, budget: int) -> bool:
        imports = seq.imports
        if not imports and not (budget > 0 and self.pages.has_slot()):
            return False
        at_least_one_token = 0 if imports else 1
        if not self._admit(seq, (len(seq.tokens) - at_least_one_token) // self.pages.size, self._headroom(seq)):
            return False
        if imports:
            self._reserve(seq)
        else:
            self._run(seq)
        if seq.exports and self._publisher.begin(seq):
            self._fill(seq)
        return True

    # ------------------------------------------------------------------------------------------ results

    def commit(self, plan: Plan, output: StepOutput) -> None:
        """Take the results of the oldest launched step. Row s of `output` belongs to the s-th sampling sequence."""
        tokens = output.accepted()
        row = len(plan.decode)
        for index, seq in enumerate(plan.decode):
            if self._take_result(seq, index, output):
                self._append(seq, index, tokens[index], output)
            if seq.phase is not RUNNING:
                self._take_leave(seq)
        for index, chunk in enumerate(plan.chunks, start=row):
            if self._take_result(chunk.seq, index, output):
                self._computed(chunk, row, tokens[row] if chunk.samples else None, output)
            row += chunk.samples
            if chunk.seq.phase is not RUNNING:
                self._take_leave(chunk.seq)
        self.speeds.committed(plan, output, self.requests.clock())

    def _take_result(self, seq: Sequence, index: int, output: StepOutput) -> bool:
        """Whether what a step has computed for `seq` counts. A preempted sequence (WAITING) still takes its tokens."""
        seq.inflight -= 1
        if seq.phase in ENDED:
            return False
        if output.corrupt and index in output.corrupt:
            self.pages.condemn(seq)
            self._stop(seq, FinishReason.ERROR, output.corrupt[index])
            return False
        seq.trust = PROVEN
        return True

    def _take_leave(self, seq: Sequence) -> None:
        """`seq` has left before its step was committed."""
        if not seq.inflight and seq in self.leaving:
            self._settle(seq)

    def _computed(self, chunk: Chunk, row: int, tokens: list[int] | None, output: StepOutput) -> None:
        """`tokens` that the chunk has sampled; None: others follow it."""
        seq, full = chunk.seq, 0
        if seq.phase is RUNNING:
            full = self.pages.share(seq, min(chunk.end, len(seq.request.token_ids)))
        if not seq.exports:
            if tokens is not None:
                self._append(seq, row, tokens, output)
        elif tokens is not None:
            self._export(seq, row, tokens, output)
        elif full > seq.num_published:
            self._publisher.publish(seq, full)

    def _export(self, seq: Sequence, row: int, tokens: list[int], output: StepOutput) -> None:
        """The prompt is complete: its first token goes out with the last chunk."""
        _, finish = seq.extend(tokens)
        first = self.outbox.report(seq, output.outputs(row, tokens, seq), finish)
        self._publisher.publish(seq, len(seq.pages), replace(first, drafts=output.drafts_of(row)))
        self._take_off(seq)
        self._leave(seq, Phase.HELD)

    def _append(self, seq: Sequence, row: int, tokens: list[int], output: StepOutput) -> None:
        if seq.silent and seq.phase is RUNNING:
            self.pages.share(seq, len(seq.request.token_ids))
        if seq.grammar is not None and len(tokens) > 1:  # behind a token that nothing may follow, none is an output
            tokens = tokens[: len(seq.grammar.masks(tokens[:-1]))]
        tokens, finish = seq.extend(tokens)
        if self._num_queries > 1:
            self._drafts.add(seq, int(output.drafted[row]), len(tokens) - 1)
        self.outbox.report(seq, output.outputs(row, tokens, seq), finish)
        if finish is not None:
            self._take_off(seq)
            self._leave(seq, Phase.DONE)
        elif seq.grammar is not None and (refused := seq.grammar.accept(tokens)):
            self._stop(seq, FinishReason.ERROR, refused)
        elif self._num_queries > 1 and seq.phase is RUNNING:
            if seq.grammar is not None:
                seq.drafts = output.drafts_of(row)
            written = len(seq.tokens) - 1  # the newest token is the next step's input
            seq.num_reserved = min(written + seq.inflight * self._num_queries, seq.capacity)

    # ------------------------------------------------------------------------------------------ reports

    def take_events(self) -> Events:
        events, self.outbox.events = self.outbox.events, Events()
        events.cache = self.pages.cache.changes.take()
        events.waits = self._waits.look(self._idle(), self.requests.clock())
        return events

    def seconds_to_look(self) -> float | None:
        """To the next look at what waits here; None: nothing does."""
        return self._waits.due_s(self._idle(), self.requests.clock())

    def _idle(self) -> Iterator[Sequence]:
        """What waits for pages, a slot or the budget of a step. Of prompts that have begun some may be computed now."""
        yield from self.requests.waiting
        yield from (seq for seq in self._prefilling if not seq.filling)
        yield from self._ready

    def load(self) -> Load:
        requests, pool = self.requests, self.pages.cache.pool
        filling = sum(seq.filling for seq in self._prefilling)
        begun = sum(seq.num_left for seq in self._prefilling)
        waiting_tokens = requests.waiting.num_tokens + begun
        return Load(
            running=len(self._prefilling) - filling + len(self._decoding),
            waiting=requests.num_waiting,
            importing=filling + len(self._importing) + len(self._ready),
            exporting=self.num_held,
            waiting_tokens=waiting_tokens,
            begun_tokens=begun,
            pages_total=pool.total,
            pages_free=pool.num_free,
            pages_cached=pool.num_cached,
            pages_published=pool.num_published,
            pages_running=pool.num_running,
            drafted=tuple(self._drafts.drafted),
            accepted=tuple(self._drafts.accepted),
            capacity=0 if self._blocked else self._capacity.capacity,
            max_running=self._capacity.max_running,
            active=requests.num_active,
            output_tokens_per_s=self.speeds.output_tokens_per_s,
            room=self._capacity.room(waiting_tokens, self.speeds),
            step_times=self.speeds.measured,
            expected_output=self._capacity.expected_output,
            counters=self.outbox.counters.copy(),
        )
