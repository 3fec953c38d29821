"""From the queue to the end of a prompt: which prompts get pages, and which tokens of them a step computes.

Leading pages of a running prompt may be filled by somebody else: a copy from the host's memory, a read from another
worker. `_fill` begins that; the sequence has its slot and pages and plans no chunk; `_filled` ends it, and the rest of
the prompt is computed. A sequence that leaves meanwhile keeps its pages until then.

The rest of a long prompt (`context_parallel_tokens`) is computed in shared chunks only, one in each turn that the
replicas give this one. In such a step every replica has half of its tokens for the shared chunk and half for prompts of
its own.
"""

import abc
import math
from collections.abc import Iterator

from millrace_common.step_times import tokens_left

from millrace_serve.engine.config import EngineConfig, shared_tokens
from millrace_serve.engine.schedule.leaving import Leaving
from millrace_serve.engine.schedule.pages import Pages
from millrace_serve.engine.schedule.plan import Chunk, ContextParallelTurn, Plan
from millrace_serve.engine.schedule.requests import EngineRequests
from millrace_serve.engine.schedule.sequence import KvWriter, Phase, Sequence, Trust
from millrace_serve.engine.schedule.speeds import Speeds


class Prompts(Leaving):
    def __init__(self, config: EngineConfig, requests: EngineRequests, pages: Pages, speeds: Speeds) -> None:
        super().__init__(config, requests, pages, speeds)
        # Of the next step; the engine sets all:
        self.turn: ContextParallelTurn | None = None  # whether it has a shared chunk
        self.limit_s = math.inf  # TPOT of sequences of all replicas
        self.spare_s = math.inf  # by which prompts may make it longer for these
        self._most = config.max_prefill_tokens  # of prompts in the step that is planned
        self._most_s = math.inf  # that these may take
        self._prefilling: dict[Sequence, None] = {}  # in order of admission
        self._joined: list[Sequence] = []  # got a slot that no plan has named yet
        self._blocked = False  # the head of the queue lacked pages when it was last tried

    def _head(self) -> Sequence | None:
        """The next sequence of the queue that may get pages. It will begin behind the launched steps."""
        return self.requests.waiting.head(self._has_turn, self.speeds.done_at(self.requests.clock()))

    @abc.abstractmethod
    def _admit_head(self, seq: Sequence, budget: int) -> bool:
        """Take `seq` off the queue, if there is room for it. `budget`: tokens that this step can compute."""

    def reserve(self) -> None:
        """Between two steps: pages for the first prompts of the queue, if their KV comes from elsewhere."""
        while (seq := self._head()) and self._admit_head(seq, budget=0):
            pass

    def _admit(self, seq: Sequence, max_cached_pages: int, headroom: int) -> bool:
        """Pages for the head of the queue, which leaves it."""
        if not self.pages.take(seq, max_cached_pages, headroom):
            self._blocked = True
            return False
        self.outbox.admitted(seq, self.requests.clock())
        self.requests.waiting.admit(seq)
        return True

    def _take_off(self, seq: Sequence) -> None:
        self.requests.waiting.discard(seq)
        self._prefilling.pop(seq, None)

    @property
    def _chunk_tokens(self) -> int:
        """Prompt tokens of this replica's own in the next step."""
        return max(self._most - shared_tokens(self._most), 1) if self.turn and self._most else self._most

    def _most_within(self, plan: Plan) -> tuple[int, float]:
        """Prompt tokens for which the decode sequences of `plan` leave time by their limits, and that time.

        Prompts whose KV other workers read take whole chunks: routers send such to prefill workers, where streams from
        before a change of duty must not halve what the change was made for.
        """
        most, head, work = self.config.max_prefill_tokens, self._head(), plan.work
        begun = [seq for seq in self._prefilling if not seq.filling]
        if (head and head.exports) or any(seq.exports for seq in begun):
            return most, math.inf
        wanted = min(sum(seq.num_left for seq in begun) + self.requests.waiting.num_tokens, most)
        limit_s, spare_s = min(plan.limit_s, self.limit_s), min(plan.spare_s, self.spare_s)
        start = self._first_start(begun, head)
        tokens, seconds = self.speeds.times.beside(limit_s, spare_s, *work[:2], start, wanted, self.pages.size)
        return min(tokens, most), seconds

    def _first_start(self, begun: list[Sequence], head: Sequence | None) -> int:
        """Computed tokens of the prompt that comes first in a step, or of the one that replicas compute together."""
        if shared := [seq.num_computed for seq in begun if self._is_long(seq)]:
            return max(shared)
        left, start = min(((seq.num_left, seq.num_computed) for seq in begun), default=(math.inf, 0))
        return 0 if head and not self._blocked and len(head.tokens) < left else start

    def _take_chunks(self, plan: Plan) -> None:
        """Chunks for the admitted prompts and for new ones, up to the step's token budget."""
        self._most, self._most_s = self._most_within(plan)
        self._blocked = False
        while (head := self._head()) and self._admit_head(head, self._room()):
            if head.phase is Phase.RUNNING and not head.filling:
                self._joined.append(head)
        prompts, most = sorted(self._own_prompts()), self.config.max_prefill_tokens
        places = [(seq.num_computed, seq.num_left) for seq in prompts]
        shares = self.speeds.times.divide(places, self._chunk_tokens, most, self._most_s)
        for seq, tokens in zip(prompts, shares, strict=True):
            self._take_chunk(plan, seq, tokens)
        self._take_shared(plan)

    def _room(self) -> int:
        """Prompt tokens of the next step that are left for newcomers."""
        rests = (seq.num_left for seq in self._own_prompts())
        return tokens_left(rests, self._chunk_tokens, self.config.max_prefill_tokens)

    def _own_prompts(self) -> Iterator[Sequence]:
        """Those that this replica computes alone."""
        return (seq for seq in self._prefilling if not seq.filling and not self._is_long(seq))

    def _has_turn(self, seq: Sequence, length_class: int) -> bool:
        """Whether a prompt may get pages now. One that takes several steps waits for those of about its length, and for
        shorter ones.
        """
        if not length_class:
            return True
        classes = (self.config.length_class(other.num_left) for other in self._prefilling if not other.filling)
        return not any(0 < other <= length_class for other in classes)

    def _is_long(self, seq: Sequence) -> bool:
        return not seq.filling and 0 < self.config.context_parallel_tokens <= seq.num_left

    def _take_shared(self, plan: Plan) -> None:
        """Use the turn, and ask for the next one; after all other chunks."""
        long = [seq for seq in self._prefilling if self._is_long(seq)]
        if long and self._most and self.turn is not None and self.turn.mine:
            self._take_chunk(plan, long[0], self.turn.replicas * shared_tokens(self._most))
            plan.chunks[-1].shared = True
        plan.wants_turn = any(map(self._is_long, long))

    def _take_chunk(self, plan: Plan, seq: Sequence, budget: int) -> int:
        """Plan the next tokens of a prompt, at most `budget`. Returns their number."""
        start = seq.num_computed
        end = min(start + budget, len(seq.tokens))
        if end <= start:
            return 0
        seq.set_computed(end)
        seq.inflight += 1
        plan.chunks.append(Chunk(seq, start, end, samples=end == len(seq.tokens)))
        if seq.preempted:
            seq.preempted = False
            again = seq.num_known - start
            self.outbox.counters["recomputed" if again > self.pages.size else "resumed"] += 1
        return end - start

    def _run(self, seq: Sequence) -> None:
        """Start to compute the prompt of a sequence that has pages. What there are copies of comes first."""
        self.pages.run(seq)
        self._prefilling[seq] = None
        if self.pages.fill(seq, lambda num_pages: self._filled(seq, num_pages, from_host=True)):
            self._fill(seq)

    def _fill(self, seq: Sequence) -> None:
        """Somebody else will write leading pages of `seq`, which has just begun to run."""
        seq.kv = KvWriter.FILLING
        seq.inflight += 1

    def _filled(self, seq: Sequence, num_pages: int, from_host: bool = False) -> None:
        """The fill is over, and nobody writes to the pages any more. The first `num_pages`, all full, have their KV: at
        least those of the prefix cache, and at least one token is left to compute.
        """
        assert seq.filling and num_pages * self.pages.size < len(seq.tokens), f"request {seq.id}, {num_pages} pages"
        seq.kv = KvWriter.OWN
        seq.inflight -= 1
        if seq.phase is not Phase.RUNNING:
            self._settle(seq)
            return
        if num_pages * self.pages.size > seq.num_computed:
            seq.set_computed(num_pages * self.pages.size)
            seq.trust = Trust.UNPROVEN
            self.outbox.filled(seq, from_host, fetched=not from_host)
        self._joined.append(seq)
