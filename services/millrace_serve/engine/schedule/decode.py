"""The scheduler of a decode or unified worker.

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
outputs, whatever its route was, as far as no tier of the prefix cache has its pages. Abort or deadline: DONE; pages of
an IMPORTING request stay until KvArrived or KvFailed ends the transfer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec
from millrace_common.reasons import Reason

from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.core import (
    Abort,
    Failure,
    FinishReason,
    KvArrived,
    KvFailed,
    KvOffered,
    KvReserved,
    Load,
    SchedulerInput,
    SequenceOutput,
)
from millrace_serve.engine.schedule.expected import Outputs, need, room
from millrace_serve.engine.schedule.pages import Pages
from millrace_serve.engine.schedule.plan import Plan, StepOutput
from millrace_serve.engine.schedule.requests import EngineRequests
from millrace_serve.engine.schedule.scheduler import Scheduler
from millrace_serve.engine.schedule.sequence import Phase, Sequence, Transfer, Trust

# Python 3.11 takes as long for a member of an enum as for a call
RUNNING, DONE, PROVEN = Phase.RUNNING, Phase.DONE, Trust.PROVEN
QUEUED = (Phase.EXPECTED, Phase.WAITING)  # without pages
RECENT = 9  # steps by which the speed is told
ROOM_S = 0.05  # for which the room that was computed is right, if no request comes or goes


class DecodeScheduler(Scheduler):
    def __init__(self, config: EngineConfig, requests: EngineRequests, pages: Pages) -> None:
        super().__init__(config, requests, pages)
        self.outputs = Outputs()
        self._num_queries = 1 + config.draft_tokens  # at most
        self._importing: set[Sequence] = set()  # a transfer into their pages may be in flight, even if they are DONE
        self._ready: dict[Sequence, None] = {}
        self._decoding: dict[Sequence, None] = {}
        self._token_s: deque[float] = deque(maxlen=RECENT)  # seconds of one sequence's token in the latest steps
        self._committed_at = 0.0
        self._room, self._room_of, self._room_at = 0, -1, 0.0  # tokens, beside so many live requests, when

    # ------------------------------------------------------------------------------------------ messages

    def handle(self, msg: SchedulerInput) -> None:
        live = self.requests.live
        match msg:
            case Abort(id):
                if (seq := live.get(id)) and seq.phase is not Phase.DONE:
                    self._stop(seq, FinishReason.ABORT)
            case KvOffered(id):
                if (seq := live.get(id)) and seq.phase is Phase.EXPECTED:
                    seq.enter(Phase.WAITING)
                    self.requests.waiting.push(seq)
            case KvArrived(id, first, drafts):
                if (seq := live.get(id)) and seq.transfer is not Transfer.NONE:
                    assert first is not None, f"request {id} arrived without a first token"
                    seq.drafts = drafts
                    self._arrived(seq, first)
            case KvFailed(id, failure):
                if (seq := live.get(id)) and seq.transfer is not Transfer.NONE:
                    self._failed(seq, failure)
            case _:
                self._handle_alike(msg)

    def _arrived(self, seq: Sequence, first: SequenceOutput) -> None:
        self._end_transfer(seq)
        if seq.phase is Phase.DONE:
            self._settle(seq)
            return
        held = seq.phase is Phase.IMPORTING
        tokens = [token.token_id for token in first.tokens]
        seq.tokens += tokens
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

    def _idle(self) -> Iterator[Sequence]:
        yield from super()._idle()
        yield from self._ready

    def _end_transfer(self, seq: Sequence) -> None:
        seq.transfer = Transfer.NONE
        self._importing.discard(seq)

    def _take_off(self, seq: Sequence) -> None:
        super()._take_off(seq)
        self._ready.pop(seq, None)
        self._decoding.pop(seq, None)

    # ------------------------------------------------------------------------------------------ scheduling

    def schedule(self) -> Plan | None:
        """Rows for every decoding sequence that has a page for one, and prompt chunks up to the step's budget. An
        undecided sequence sits this step out.
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
            victim = max((*self._ready, *self._prefilling, *self._decoding), key=_order)
            self._preempt(victim)
            stuck, short = ([seq for seq in group if seq is not victim] for group in (stuck, short))
        if cache.available < len(stuck):
            stuck = sorted(stuck, key=_order)[: cache.available]
        for seq in stuck:
            self.pages.grow(seq, 1)
        plan.grown = stuck + self._grow_for_drafts(short) if q > 1 else stuck

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

    def _preempt(self, seq: Sequence) -> None:
        self._take_off(seq)
        seq.preempted, seq.num_known = True, seq.num_computed
        self.outbox.counters["preemptions"] += 1
        self._leave(seq, Phase.WAITING)

    def _take_decodes(self, plan: Plan) -> None:
        decode, q = plan.decode, self._num_queries
        for seq in self._decoding:
            reserved, capacity = seq.num_reserved, seq.capacity
            if reserved < capacity and (seq.grammar is None or not seq.undecided):
                seq.num_computed = len(seq.tokens)
                seq.num_reserved = reserved + q if reserved + q < capacity else capacity
                seq.inflight += 1
                decode.append(seq)

    def _take_chunk(self, plan: Plan, seq: Sequence, budget: int) -> int:
        taken = super()._take_chunk(plan, seq, budget)
        if taken and seq.preempted:
            seq.preempted = False
            again = seq.num_known - plan.chunks[-1].start
            self.outbox.counters["recomputed" if again > self.pages.size else "resumed"] += 1
        if taken and plan.chunks[-1].samples:
            del self._prefilling[seq]
            self._decoding[seq] = None
        return taken

    def _admit_head(self, seq: Sequence, budget: int) -> bool:
        length, size = len(seq.tokens), self.pages.size
        if seq.transfer is Transfer.AWAITED:
            if not self._admit(seq, length // size, self._headroom(seq)):
                return False
            self._reserve(seq)
            return True
        at_least_one_token = (length - 1) // size
        if not self._may_admit(budget) or not self._admit(seq, at_least_one_token, self._headroom(seq)):
            return False
        self._run(seq)
        return True

    def _headroom(self, newcomer: Sequence) -> int:
        """Pages that stay back: one for each sequence that decodes or is ready to, or what all outputs are expected to
        need if that is more. Nothing stays back for a newcomer that is alone.
        """
        importing = (seq for seq in self._importing if seq.phase is Phase.IMPORTING)
        holders = [*importing, *self._ready, *self._prefilling, *self._decoding]
        if not holders:
            return 0
        needs = [(self._rest(seq), len(seq.tokens) - seq.num_cached_tokens) for seq in holders]
        needs.append((self._rest(newcomer), 0))
        return max(self.pages.count(need(needs)), len(self._ready) + len(self._decoding))

    def _rest(self, seq: Sequence) -> int:
        return min(self.outputs.rest(seq.num_outputs, seq.order[1]), seq.limit - len(seq.tokens))

    def _reserve(self, seq: Sequence) -> None:
        seq.enter(Phase.IMPORTING)
        seq.transfer = Transfer.READING
        self._importing.add(seq)
        num_cached_pages = seq.num_computed // self.pages.size
        self.outbox.events.reserved.append(KvReserved(seq.id, list(seq.pages), num_cached_pages))

    def _leave(self, seq: Sequence, phase: Phase) -> None:
        if phase is DONE and seq.phase is RUNNING and seq.num_outputs and not seq.request.warms:
            self.outputs.ended(seq.num_outputs)
        super()._leave(seq, phase)

    # ------------------------------------------------------------------------------------------ results

    def commit(self, plan: Plan, output: StepOutput) -> None:
        """Row s of `output` belongs to the s-th sampling sequence of `plan`."""
        tokens = output.accepted()
        row = len(plan.decode)
        for index, seq in enumerate(plan.decode):
            self._take_result(seq, index, index, tokens, output)
        for index, chunk in enumerate(plan.chunks, start=row):
            self._take_result(chunk.seq, index, row if chunk.samples else -1, tokens, output)
            row += chunk.samples
        self._measure(plan, output)

    def _measure(self, plan: Plan, output: StepOutput) -> None:
        """A launched step computes from the end of the one before it."""
        now, rows = self.requests.clock(), len(plan.decode)
        if rows and not plan.chunks:
            tokens = int(output.counts[:rows].sum()) / rows
            self._token_s.append((now - max(plan.began, self._committed_at)) / tokens)
        self._committed_at = now

    @property
    def _tokens_per_s(self) -> float:
        """The median: behind a step that was committed late the next one seems to take less."""
        median = sorted(self._token_s)[len(self._token_s) // 2] if self._token_s else 0.0
        return 1 / median if median else 0.0

    def _take_result(self, seq: Sequence, index: int, row: int, tokens: list[list[int]], output: StepOutput) -> None:
        """`row` is -1 for a chunk that sampled nothing. A preempted sequence (WAITING) still takes its tokens."""
        seq.inflight -= 1
        if output.corrupt and index in output.corrupt and seq.phase is not DONE:
            self._condemn(seq, output.corrupt[index])
        elif seq.phase is not DONE:
            seq.trust = PROVEN
            if row >= 0:
                self._append(seq, row, tokens[row], output)
        if seq.phase is not RUNNING and not seq.inflight and seq in self.leaving:
            self._settle(seq)

    def _append(self, seq: Sequence, row: int, tokens: list[int], output: StepOutput) -> None:
        if seq.silent and seq.phase is RUNNING:
            self.pages.share(seq, len(seq.request.token_ids))
        if seq.grammar is not None and len(tokens) > 1:  # behind a token that nothing may follow, none is an output
            tokens = tokens[: len(seq.grammar.masks(tokens[:-1]))]
        tokens, finish = seq.extend(tokens)
        if self._num_queries > 1:
            self.outbox.drafts.add(seq, int(output.drafted[row]), len(tokens) - 1)
        self.outbox.output(seq, output.outputs(row, tokens, seq), finish)
        if finish is not None:
            self._take_off(seq)
            self._leave(seq, Phase.DONE)
        elif seq.grammar is not None and (refused := seq.grammar.accept(tokens)):
            self._stop(seq, FinishReason.ERROR, refused)
        elif self._num_queries > 1 and seq.phase is RUNNING:
            if seq.grammar is not None:
                seq.drafts = output.drafts_of(row)
            self._narrow(seq)

    def _narrow(self, seq: Sequence) -> None:
        """The upper bound, now that the count of the oldest launched step is known."""
        written = len(seq.tokens) - 1  # the newest token is the next step's input
        seq.num_reserved = min(written + seq.inflight * self._num_queries, seq.capacity)

    def load(self) -> Load:
        running = len(self._prefilling) + len(self._decoding)
        load = self._load(running, importing=len(self._importing) + len(self._ready), exporting=0)
        most = self.config.max_running + min(self.config.max_running // 8 + 1, self.config.max_waiting)
        capacity = max(min(load.capacity, most - self.requests.num_active), 0)
        return msgspec.structs.replace(
            load,
            capacity=capacity,
            room=self._room_now(),
            expected_output=self.outputs.mean,
            output_tokens_per_s=self._tokens_per_s,
        )

    def _room_now(self) -> int:
        live, now = len(self.requests.live), self.requests.clock()
        if live != self._room_of or now >= self._room_at + ROOM_S:
            self._room, self._room_of, self._room_at = self._compute_room(), live, now
        return self._room

    def _compute_room(self) -> int:
        """Tokens that a newcomer like the present ones may have, its expected output included, so that `_headroom` will
        find pages for it. Requests that have no pages yet are counted as if they came now.
        """
        live = [seq for seq in self.requests.live.values() if seq.phase is not DONE]
        size, cache, count, mean = self.pages.size, self.pages.cache, self.pages.count, self.outputs.mean
        if not live:
            return cache.pool.total * size
        needs, queued, typical = [], 0, 0
        for seq in live:
            length = len(seq.tokens)
            rest = min(self.outputs.expected(seq.num_outputs, seq.order[1]), seq.limit - length)
            needs.append(((count(length + rest) - count(length)) * size, length - seq.num_cached_tokens))
            queued += count(length) if seq.phase in QUEUED else 0
            typical += min(mean, seq.request.sampling.max_tokens)
        available = cache.available - queued - 1  # for the newcomer's last page
        return room(available * size, needs, typical // len(live))


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order
