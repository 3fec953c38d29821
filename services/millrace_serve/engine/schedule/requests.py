"""The requests of one engine: the live ones, their deadlines, and the room for more."""

import itertools
import logging
import math
from collections.abc import Callable

from millrace_common.log import PER_REQUEST
from millrace_common.page_hash import page_hashes
from millrace_common.reasons import Reason

from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import Failure, Request, RequestId
from millrace_serve.engine.grammar.grammars import Grammars, Walk
from millrace_serve.engine.schedule.limits import ModelFacts, refusal, sequence_limit
from millrace_serve.engine.schedule.sequence import Phase, Sequence
from millrace_serve.engine.schedule.waiting import WaitingQueue

log = logging.getLogger(__name__)


class EngineRequests:
    def __init__(
        self, config: EngineConfig, role: Role, facts: ModelFacts, clock: Callable[[], float], grammars: Grammars
    ) -> None:
        self.live: dict[RequestId, Sequence] = {}  # every sequence that holds something or is waited for
        self.waiting = WaitingQueue()
        self.num_active = 0  # requests that still need this engine's work: neither DONE nor HELD
        self.clock = clock
        self.vocab_size = facts.vocab_size
        self._config, self._role, self._facts = config, role, facts
        self._grammars = grammars
        self._arrivals = itertools.count()
        self._next_deadline = math.inf  # no active request has an earlier one

    def enrol(self, request: Request) -> Sequence | Failure | None:
        """Return a new sequence, in no queue yet; or why it is refused; or None for a repeated submission."""
        if request.id in self.live:
            log.warning("ignored the second submission of request %s", request.id, extra=PER_REQUEST)
            return None
        failure = refusal(request, self._config, self._facts, self._role)
        if failure is None and self.room() <= 0:
            most = self._config.max_running + self._config.max_waiting
            failure = Failure(Reason.OVERLOADED, f"the worker has {most} requests, max_running + max_waiting")
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
        # now, while no step waits for them
        hashes = page_hashes(request.token_ids, self._config.page_size, salt=request.cache_salt)
        deadline = math.inf if request.timeout_s is None else now + request.timeout_s
        seq = Sequence(request, order, sequence_limit(request), stop_ids, hashes, now, deadline, walk)
        self.live[seq.id] = seq
        self.num_active += 1
        self._next_deadline = min(self._next_deadline, deadline)
        return seq

    def room(self) -> int:
        """Number of further requests that are taken now."""
        return self._config.max_running + self._config.max_waiting - self.num_active - self._grammars.waiting

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + self._grammars.waiting

    def expired(self) -> list[Sequence]:
        """Sequences whose deadline has passed and whose work is not over; each is returned once."""
        now = self.clock()
        if now < self._next_deadline:
            return []
        active = [seq for seq in self.live.values() if seq.phase not in (Phase.DONE, Phase.HELD)]
        self._next_deadline = min((seq.deadline for seq in active if seq.deadline > now), default=math.inf)
        return [seq for seq in active if seq.deadline <= now]

    def seconds_to_deadline(self) -> float | None:
        """To the earliest deadline; it may be that of a request that has ended since."""
        return None if math.isinf(self._next_deadline) else max(self._next_deadline - self.clock(), 0.0)
