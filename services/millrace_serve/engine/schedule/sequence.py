"""One request inside a scheduler.

    phase       left by                                          slot   pages       kv
    EXPECTED    KvOffered, or no prefix fetch -> WAITING         -      -           AWAITED, OWN
    WAITING     admitted -> RUNNING; reserved -> IMPORTING       (a)    (a)         OWN, AWAITED, FILLING
    IMPORTING   KvArrived -> READY                               -      own         READING
    READY       a free slot -> RUNNING; preempted -> WAITING     -      own         OWN
    RUNNING     preempted -> WAITING; exported -> HELD           own    own         OWN, FILLING
    HELD        LeaseEnded -> DONE                               (a)    published   OWN, FILLING
    DONE        nothing                                          (a)    (a) (b)     any

Every phase may go to DONE by abort, deadline or failure. (a) A sequence that has left RUNNING keeps its slot and its
pages while a launched step still names it or somebody else fills its pages (`inflight` > 0). (b) A sequence that was
IMPORTING keeps its pages until the transfer is over (`kv` is READING).

The bounds of a running sequence (docs/explanation/engine.md) hold for the time when all launched steps are done:

    position  0 ........ num_computed ........ num_reserved ........ capacity ........ limit
              known, and KV is there | KV may be there  | has a page       | has no page yet
"""

import enum
import math
from array import array
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from millrace_common.page_hash import page_hashes
from millrace_common.transitions import Transitions

from millrace_serve.engine.cache.kv_cache import CachedPrefix
from millrace_serve.engine.core import CachedTokens, FinishReason, Request, RequestId, Route
from millrace_serve.engine.grammar.grammars import Walk


class Phase(enum.Enum):
    EXPECTED = enum.auto()
    WAITING = enum.auto()
    IMPORTING = enum.auto()
    READY = enum.auto()
    RUNNING = enum.auto()
    HELD = enum.auto()
    DONE = enum.auto()


class KvWriter(enum.Enum):
    """Who writes the KV of a prompt."""

    OWN = enum.auto()  # this worker, or it is all there
    AWAITED = enum.auto()  # another worker computes the prompt
    READING = enum.auto()  # the same, and reads into the sequence's pages may be in flight
    FILLING = enum.auto()  # copies, or another worker, write leading pages: no step may use the sequence yet


class Trust(enum.Enum):
    """Whether the sequence's pages may enter the prefix cache."""

    PROVEN = enum.auto()
    UNPROVEN = enum.auto()  # imported or filled, and no step has used the pages yet
    CORRUPT = enum.auto()  # a step found a page with other tokens


PHASES = Transitions(
    {
        Phase.EXPECTED: {Phase.WAITING, Phase.DONE},
        Phase.WAITING: {Phase.IMPORTING, Phase.RUNNING, Phase.DONE},
        Phase.IMPORTING: {Phase.READY, Phase.DONE},
        Phase.READY: {Phase.RUNNING, Phase.WAITING, Phase.DONE},
        Phase.RUNNING: {Phase.WAITING, Phase.HELD, Phase.DONE},
        Phase.HELD: {Phase.DONE},
        Phase.DONE: (),
    }
)


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """`tokens` has the known tokens; those that launched steps sample are not in it yet."""

    request: Request
    order: tuple[int, int]  # (-priority, arrival): smaller goes first, and is preempted last
    limit: int  # tokens, prompt included, at which the sequence finishes by LENGTH
    stop_ids: frozenset[int]
    prompt_hashes: list[bytes]  # of each page of request.token_ids (millrace_common/page_hash.py)
    arrived: float = 0.0  # on the scheduler's clock
    deadline: float = math.inf  # on the same clock
    grammar: Walk | None = None  # where `tokens` stand in the request's grammar
    id: RequestId = field(init=False)
    tokens: "array[int]" = field(init=False)
    num_prompt: int = field(init=False)
    exports: bool = field(init=False)  # other workers read its pages
    tpot_limit_s: float = field(init=False)
    phase: Phase = Phase.WAITING
    kv: KvWriter = KvWriter.OWN
    trust: Trust = Trust.PROVEN
    late_at: float = math.inf  # on the scheduler's clock: a prompt that begins later will miss its TTFT limit
    late: bool = False  # so found in the queue
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    prefix: CachedPrefix | None = None
    capacity: int = 0  # positions that have a page and may be written
    num_computed: int = 0  # tokens that are known and have their KV once the launched steps are done
    num_reserved: int = 0  # tokens that have their KV then, at most
    inflight: int = 0  # launched steps that name this sequence and are not committed; 1 more while it is filling
    found: CachedTokens = field(default_factory=CachedTokens)
    preempted: bool = False  # and not computing again yet
    num_known: int = 0  # tokens whose KV was found or filled, or was here when the sequence was preempted
    due_s: float = math.nan  # token n is due at `due_s` + n x AIM x the TPOT limit; nan: it has not decoded yet
    silent: bool = True  # no output has been sent yet
    queued_s: float = 0.0  # until the sequence got its first pages
    drafts: tuple[int, ...] = ()  # that came with the KV; with a grammar those of the newest step; the device has them
    num_drafted: int = 0  # drafts that steps have verified
    num_accepted: int = 0  # of these
    num_published: int = 0  # pages announced in KvChunks
    num_offered: int = 0  # leading pages that another worker serves

    def __lt__(self, other: Self) -> bool:
        return self.order < other.order

    def __post_init__(self) -> None:
        self.id, self.tokens = self.request.id, array("I")
        self.tokens.frombytes(np.asarray(self.request.token_ids, np.uint32).data.cast("B"))
        self.num_prompt = len(self.tokens) - self.request.num_prior_outputs
        self.exports = self.request.route is Route.EXPORT
        self.tpot_limit_s = self.request.tpot_limit_s or math.inf
        if self.request.route is Route.IMPORT:
            self.phase, self.kv = Phase.EXPECTED, KvWriter.AWAITED
        elif self.request.fetches_prefix:
            self.phase = Phase.EXPECTED

    @property
    def row_tokens(self) -> tuple[int, ...]:
        """Tokens of its rows in the next step, as far as the host knows them: the newest one, and drafts."""
        return (self.tokens[-1], *self.drafts)

    @property
    def num_outputs(self) -> int:
        """Output tokens of the room, earlier attempts included."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Known tokens that no step has computed, or will have."""
        return len(self.tokens) - self.num_computed

    @property
    def imports(self) -> bool:
        """Another worker computes the prompt, and its KV has not arrived."""
        return self.kv is KvWriter.AWAITED or self.kv is KvWriter.READING

    @property
    def filling(self) -> bool:
        return self.kv is KvWriter.FILLING

    def page_hashes(self, num_pages: int, size: int) -> list[bytes]:
        """Hashes of the first pages, which must be full."""
        full = min(len(self.request.token_ids) // size, num_pages)
        hashes = self.prompt_hashes[:full]
        rest = self.tokens[full * size : num_pages * size]
        return hashes + page_hashes(rest, size, salt=self.request.cache_salt, prev=hashes[-1] if hashes else None)

    def enter(self, phase: Phase) -> None:
        self.phase = PHASES.move(self.phase, phase, f"request {self.id}")

    def set_computed(self, num_tokens: int) -> None:
        """The KV of exactly so many tokens is in the pages, or will be with the step that is being planned."""
        self.num_computed = self.num_reserved = num_tokens

    def extend(self, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
        """Append outputs up to the one that ends the sequence. Returns these outputs, and why the sequence ends."""
        known, limit = self.tokens, self.limit
        if len(known) + len(tokens) < limit and self.stop_ids.isdisjoint(tokens):  # nearly always
            known.fromlist(tokens)
            return tokens, None
        for count, token in enumerate(tokens, start=1):
            known.append(token)
            if token in self.stop_ids and self.num_outputs > self.request.sampling.min_tokens:
                return tokens[:count], FinishReason.STOP
            if len(known) >= limit:
                return tokens[:count], FinishReason.LENGTH
        return tokens, None
