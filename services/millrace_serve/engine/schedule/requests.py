"""The requests of one engine: the live ones, their deadlines, and the room for more."""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable

from millrace_common.page_hash import page_hashes
from millrace_common.reasons import Reason

from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import Failure, Request, RequestId
from millrace_serve.engine.grammar.grammars import Grammars, Walk
from millrace_serve.engine.schedule.limits import ModelFacts, refusal, sequence_limit
from millrace_serve.engine.schedule.sequence import Phase, Sequence
from millrace_serve.engine.schedule.waiting import WaitingQueue

log = logging.getLogger(__name__)

ENDED_DEADLINES = 64  # deadlines of ended requests that are kept beside as many as there are active requests
Deadline = tuple[float, tuple[int, int], Sequence]


class Requests:
    def __init__(
        self,
        config: EngineConfig,
        role: Role,
        facts: ModelFacts,
        clock: Callable[[], float],
        grammars: Grammars,
    ) -> None:
        self.live: dict[RequestId, Sequence] = {}  # every sequence that holds something or is waited for
        self.waiting = WaitingQueue()
        self.num_active = 0  # requests that still need this engine's work: neither DONE nor PARKED
        self.clock = clock
        self._config, self._role, self._facts = config, role, facts
        self._grammars = grammars
        self._arrivals = itertools.count()
        self._deadlines: list[Deadline] = []  # a heap

    def enrol(self, request: Request) -> Sequence | Failure | None:
        """Return a new sequence, in no queue yet; or why it is refused; or None for a repeated submission."""
        if request.id in self.live:
            log.warning("request %s is here already; its second submission is ignored", request.id)
            return None
        failure = refusal(request, self._config, self._facts, self._role)
        if failure is None and self.room() <= 0:
            most = self._config.max_running + self._config.max_waiting
            failure = Failure(Reason.OVERLOADED, f"max_running + max_waiting = {most} requests are here")
        if failure is not None:
            return failure
        walk = None if request.sampling.grammar is None else self._grammars.walk(request)
        if isinstance(walk, Failure):
            return walk
        return self._add(request, walk)

    def _add(self, request: Request, walk: Walk | None) -> Sequence:
        params, now = request.sampling, self.clock()
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._facts.eos_token_ids)
        order = (-request.priority, next(self._arrivals))
        hashes = page_hashes(request.token_ids, self._config.page_size)  # now, while no step waits for them
        seq = Sequence(request, order, sequence_limit(request, self._config), stop_ids, hashes, now, walk)
        self.live[seq.id] = seq
        self.num_active += 1
        if request.timeout_s is not None:
            self._watch((now + request.timeout_s, order, seq))
        return seq

    def room(self) -> int:
        """Number of further requests that are taken now."""
        return self._config.max_running + self._config.max_waiting - self.num_active - self._grammars.waiting

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + self._grammars.waiting

    def expired(self) -> list[Sequence]:
        """Sequences whose deadline has passed and whose work is not over; each is returned once."""
        now, late = self.clock(), []
        while self._deadlines and self._deadlines[0][0] <= now:
            seq = heapq.heappop(self._deadlines)[2]
            if not _is_over(seq):
                late.append(seq)
        return late

    def seconds_to_deadline(self) -> float | None:
        while self._deadlines and _is_over(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return max(self._deadlines[0][0] - self.clock(), 0.0) if self._deadlines else None

    def _watch(self, deadline: Deadline) -> None:
        """Drops ended requests long before their deadlines when they are many: each entry keeps a request's tokens."""
        heapq.heappush(self._deadlines, deadline)
        if len(self._deadlines) > 2 * self.num_active + ENDED_DEADLINES:
            self._deadlines = [one for one in self._deadlines if not _is_over(one[2])]
            heapq.heapify(self._deadlines)


def _is_over(seq: Sequence) -> bool:
    """Whether this engine has no more work with the sequence."""
    return seq.phase in (Phase.DONE, Phase.PARKED)
