"""One request inside a scheduler.

    phase       left by                                        holds
    EXPECTED    KvOffered -> WAITING                           nothing              (IMPORT only)
    WAITING     admitted -> RUNNING; reserved -> IMPORTING     nothing
    IMPORTING   KvArrived -> READY; KvFailed -> DONE           pages                (IMPORT only)
    READY       a free slot -> RUNNING; preempted -> WAITING   pages                (IMPORT only)
    RUNNING     preempted -> WAITING; exported -> PARKED       slot, pages
    PARKED      LeaseEnded -> DONE                             published pages      (EXPORT only)
    DONE        (absorbing)                                    see below

Every phase may go to DONE by abort, deadline or failure. A sequence that left RUNNING keeps its pages and its slot
while a launched step still names it (`inflight` > 0), and a DONE one that was IMPORTING keeps its pages until the
transfer is over.
"""

from __future__ import annotations

import enum

from millrace_common.page_hash import page_hashes

from millrace_serve.engine.cache.kv_cache import CachedPrefix
from millrace_serve.engine.core import FinishReason, Request, Route
from millrace_serve.engine.grammar.grammars import Walk


class Phase(enum.Enum):
    EXPECTED = enum.auto()
    WAITING = enum.auto()
    IMPORTING = enum.auto()
    READY = enum.auto()
    RUNNING = enum.auto()
    PARKED = enum.auto()
    DONE = enum.auto()


LEGAL = {
    Phase.EXPECTED: {Phase.WAITING, Phase.DONE},
    Phase.WAITING: {Phase.IMPORTING, Phase.RUNNING, Phase.DONE},
    Phase.IMPORTING: {Phase.READY, Phase.DONE},
    Phase.READY: {Phase.RUNNING, Phase.WAITING, Phase.DONE},
    Phase.RUNNING: {Phase.WAITING, Phase.PARKED, Phase.DONE},
    Phase.PARKED: {Phase.DONE},
    Phase.DONE: set(),
}


class Sequence:
    """`tokens` holds what is known; the token that a step in flight samples is not in it yet."""

    __slots__ = (
        "arrived",
        "corrupt",
        "deadline",
        "grammar",
        "id",
        "imports",
        "in_transfer",
        "inflight",
        "limit",
        "num_cached_tokens",
        "num_prompt",
        "num_published",
        "num_scheduled",
        "order",
        "pages",
        "phase",
        "prefix",
        "prompt_hashes",
        "queued_s",
        "request",
        "silent",
        "slot",
        "stop_ids",
        "tokens",
        "trusted",
    )

    def __init__(
        self,
        request: Request,
        order: tuple[int, int],
        deadline: float | None,
        limit: int,
        stop_ids: frozenset[int],
        prompt_hashes: list[int],
    ) -> None:
        self.request = request
        self.id = request.id
        self.order = order  # (-priority, arrival): smaller goes first, and is preempted last
        self.deadline = deadline
        self.limit = limit  # tokens, prompt included, at which it finishes by LENGTH
        self.stop_ids = stop_ids
        self.prompt_hashes = prompt_hashes  # of each page of request.token_ids (millrace_common/page_hash.py)
        self.tokens = list(request.token_ids)
        self.num_prompt = len(request.token_ids) - request.num_prior_outputs
        self.imports = request.route is Route.IMPORT  # its KV is still to come from another worker
        self.phase = Phase.EXPECTED if self.imports else Phase.WAITING
        self.in_transfer = False  # reads into its pages may be in flight
        self.slot = -1
        self.pages: list[int] = []
        self.prefix: CachedPrefix | None = None
        self.num_scheduled = 0  # tokens whose KV is there or will be written by a launched step
        self.inflight = 0  # launched steps that name this sequence and are not committed
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache
        self.silent = True  # nothing was said about it yet
        self.arrived = 0.0  # on the roster's clock
        self.queued_s = 0.0  # until it got its first pages
        self.trusted = True  # else its pages must not enter the prefix cache: imported and not used yet
        self.corrupt = False  # one of its pages was found wrong
        self.num_published = 0  # pages announced in KvParts
        self.grammar: Walk | None = None  # where `tokens` stand in the request's grammar

    @property
    def num_outputs(self) -> int:
        """Output tokens of the room, earlier attempts included."""
        return len(self.tokens) - self.num_prompt

    @property
    def undecided(self) -> bool:
        """Which tokens may come next depends on one that is still being sampled: it must sit out until that is known.

        Everybody else's next step can be launched before the last one was read; a grammar's mask is made from it.
        """
        return self.grammar is not None and self.inflight > 0

    def page_hashes(self, num_pages: int, size: int) -> list[int]:
        """Of its first pages, which must be full."""
        full = min(len(self.request.token_ids) // size, num_pages)
        hashes = self.prompt_hashes[:full]
        rest = self.tokens[full * size : num_pages * size]
        return hashes + page_hashes(rest, size, prev=hashes[-1] if hashes else 0)

    def enter(self, phase: Phase) -> None:
        assert phase in LEGAL[self.phase], f"request {self.id}: {self.phase} -> {phase}"
        self.phase = phase

    def finish_of(self, token: int) -> FinishReason | None:
        """Whether `token`, just appended, ends the sequence."""
        if token in self.stop_ids and self.num_outputs > self.request.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else None
