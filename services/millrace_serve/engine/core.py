"""Requests, commands and events of the engine; no torch, no grpc. worker/messages.py and transfer/messages.py have the
other messages inside a worker.

Life of a request inside one engine:

    Request (frozen, as submitted)
      -> Sequence (mutable, owned by the scheduler)
        -> Plan (the sequences of a step and their tokens)
          -> StepBatch (the step's arrays; engine/step/batch.py)
            -> StepOutput (what the runner returned)
              -> Events (reports to the frontend)

`Route` is the life of a request: LOCAL runs both phases here; EXPORT runs the prompt, samples one token, and holds the
KV pages for a decode worker; IMPORT receives a prompt's KV from a prefill worker and decodes. The messages are msgspec
structs because they cross from the frontend process to the rank processes unchanged.
"""

import enum

import msgspec

TOKEN_BYTES = 4
TokenIds = memoryview | list[int]  # below 2^32; a view (I) crosses processes as bytes that nobody on its way reads


class RequestId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Identity of one attempt of one request, so that a stale message is never taken for a live one."""

    room: int  # random u64, drawn by the router once per request
    attempt: int  # 0, 1, ... within the room

    def __str__(self) -> str:
        return f"{self.room:016x}.{self.attempt}"


class Route(enum.StrEnum):
    LOCAL = "local"
    EXPORT = "export"
    IMPORT = "import"


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an EOS or stop token was sampled; it is the last of token_ids
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # Abort was received
    ERROR = "error"  # see SequenceOutput.error


class GrammarKind(enum.StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"  # llguidance's own form, in which routers write tool calls


class Grammar(msgspec.Struct, frozen=True):
    """The texts that an output may be. It restricts tokens from the first output on, or after `after_token_id`; until
    then only the end of the sequence and `forbidden_before` are forbidden. `marks`: texts that no tokens of text spell.
    """

    kind: GrammarKind
    text: str
    after_token_id: int | None = None
    forbidden_before: tuple[int, ...] = ()
    marks: tuple[str, ...] = ()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Validated and fully resolved: no value here is optional except `logprobs` and `grammar`."""

    max_tokens: int  # >= 1, output tokens over all attempts of the room
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = whole vocabulary
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # u64; always set, so every try of a room draws the same noise at the same position
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the sampled token's logprob and the k most likely
    grammar: Grammar | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted request. `token_ids` is the prompt followed by the outputs of earlier attempts (replay)."""

    id: RequestId
    token_ids: TokenIds
    sampling: SamplingParams
    route: Route = Route.LOCAL
    num_prior_outputs: int = 0  # how many trailing token_ids are outputs of earlier attempts
    priority: int = 0  # higher first
    timeout_s: float | None = None  # from arrival at this worker; None = no deadline
    cache_salt: bytes = b""  # cached pages are shared with requests of equal salts only
    keep_s: int = 0  # its pages are evicted after others for so long, from its end on
    warms: bool = False  # of the worker itself: it tells nothing of the outputs that clients want
    tpot_limit_s: float = 0.0  # chunks of prompts beside its output tokens are so short that steps keep it; 0: none
    ttft_limit_s: float = 0.0  # from arrival at this worker to its first token, which is late then; 0: never
    # EXPORT: its leading pages may come from another worker; it waits for KvOffered or KvFailed
    fetches_prefix: bool = False

    def __post_init__(self) -> None:
        """Ids that were sent come as bytes, of which msgspec makes no copy."""
        if isinstance(self.token_ids, memoryview) and self.token_ids.format == "B":
            msgspec.structs.force_setattr(self, "token_ids", self.token_ids.cast("I"))


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float | None = None  # natural log, of the distribution before temperature and filters
    top: tuple[TopLogprob, ...] = ()


class Failure(msgspec.Struct, frozen=True):
    """Why a sequence ended in error; `reason` is a value of millrace_common.reasons.Reason."""

    reason: str
    message: str


class CachedTokens(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens whose KV was there. The names are those of worker.proto and of the counters of Load."""

    cached_tokens: int = 0  # from a prefix cache, wherever it has them
    host_cached_tokens: int = 0  # of these, from the host tier
    fetched_tokens: int = 0  # of these, from another worker


class SequenceOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one sequence after one step. `first_index` is the 0-based output position of tokens[0]."""

    id: RequestId
    first_index: int
    tokens: list[TokenOutput]
    finish: FinishReason | None = None
    error: Failure | None = None
    found: CachedTokens = CachedTokens()  # set on the first output
    queued_s: float = 0.0  # from its arrival until it got pages; set on the first output
    num_drafted: int = 0  # drafts that this engine verified for the sequence; set on the last output
    num_accepted: int = 0  # of these
    drafts: tuple[int, ...] = ()  # of the tokens behind; set where another worker goes on


class KvChunk(msgspec.Struct, frozen=True):
    """Finished pages of an exported prompt. Parts of a request arrive in order and never overlap. The first comes when
    the prompt is admitted; it has the cached pages, perhaps none.
    """

    id: RequestId
    first_page: int  # index of page_ids[0] in the sequence's page list
    page_ids: list[int]  # physical pages in the exporter's pool
    fingerprints: list[bytes]  # the block of each page (millrace_common/page_hash.py)
    num_tokens: int  # prompt tokens whose KV is ready, this chunk included
    last: bool
    first: SequenceOutput | None = None  # on the last chunk: the first token, perhaps already final


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop working on `id`. Pages under transfer stay allocated until KvArrived or KvFailed ends it."""

    id: RequestId


class KvOffered(msgspec.Struct, frozen=True, tag=True):
    """The exporter of an IMPORT request has its first pages ready, or another worker serves the first `num_pages` of a
    prompt that is computed here: reserve ours and answer with KvReserved.
    """

    id: RequestId
    num_pages: int = 0


class KvArrived(msgspec.Struct, frozen=True, tag=True):
    """All pages were read and the exporter confirmed that they were held throughout. Decoding may start, or (a prefix
    fetch, without `first`) the computation of the rest.
    """

    id: RequestId
    first: SequenceOutput | None = None


class KvFailed(msgspec.Struct, frozen=True, tag=True):
    """The transfer is over without KV and no operation on our pages is in flight any more: free them, or (a prefix
    fetch) compute what should have been in them.
    """

    id: RequestId
    failure: Failure


class KvLate(msgspec.Struct, frozen=True, tag=True):
    """A prefix fetch failed while reads into our pages were in flight: compute in other pages. KvFailed follows."""

    id: RequestId


class ServePrefix(msgspec.Struct, frozen=True, tag=True):
    """Hold the cached pages of these blocks, as far as they go, until LeaseEnded; answer with a KvChunk. A prefix fetch
    is none of the requests: its id has room 0.
    """

    id: RequestId
    blocks: list[bytes]  # of a prefix's pages (millrace_common/page_hash.py)


class LeaseEnded(msgspec.Struct, frozen=True, tag=True):
    """The pages of an exported request or of a prefix fetch were released or their lease expired: they may be
    reused.
    """

    id: RequestId


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Drop every prefix-cache page that no sequence uses."""


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Begin no step until a Pause with `on` false; messages are handled meanwhile, and deadlines wait."""

    on: bool


class Wait(msgspec.Struct, frozen=True, array_like=True):
    """A request waits for its turn, pages or a slot, because others have them; `over`: it goes on."""

    id: RequestId
    over: bool = False


class KvReserved(msgspec.Struct, frozen=True, tag=True):
    """Pages for an IMPORT request or a prefix fetch. The first `num_cached_pages` are filled from our own prefix
    cache.
    """

    id: RequestId
    page_ids: list[int]
    num_cached_pages: int


class CacheChange(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of full pages (millrace_common/page_hash.py) that the tiers of the prefix cache have gained and lost: the
    device's pages, and their copies in the host's memory.
    """

    stored: list[bytes]
    removed: list[bytes]
    host_stored: list[bytes] = []
    host_removed: list[bytes] = []


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for routing and metrics. Tokens and pages, of one replica."""

    running: int = 0
    waiting: int = 0
    importing: int = 0  # sequences whose KV is on its way here
    exporting: int = 0  # prompts held under a lease
    waiting_tokens: int = 0  # prompt tokens that no step has computed yet
    begun_tokens: int = 0  # those of them whose prompts have begun, and pages
    pages_total: int = 0  # without the null page
    pages_free: int = 0
    pages_cached: int = 0  # evictable prefix-cache pages
    pages_published: int = 0
    pages_running: int = 0
    host_pages_total: int = 0  # copies of pages that the host tier has room for
    host_pages_used: int = 0
    drafted: tuple[int, ...] = ()  # drafts ever verified, by their place behind the last token
    accepted: tuple[int, ...] = ()  # of these
    capacity: int = 0  # further requests this replica is willing to take now
    max_running: int = 0  # sequences that run at a time; 0: of a prefill worker
    active: int = 0  # requests that this engine still has work with
    paused: bool = False  # it begins no step, and no step and no copy of pages is under way
    # Of the whole worker, where experts are balanced (model/eplb/moving.py):
    expert_imbalance: tuple[float, ...] = ()  # of each MoE layer lately: choices on the busiest rank over the mean
    expert_moves: int = 0  # experts that ever changed their place
    experts_moved_at: float = 0.0  # Unix time of the last move; 0: none
    room: int | None = None  # tokens of further requests (worker.proto); None: only capacity counts
    expected_output: int = 0  # tokens of an output, where max_tokens allows as many
    output_tokens_per_s: float = 0.0  # of one sequence, by the latest steps without prompts; 0: not measured
    # What only grows. "name" is millrace_engine_total{what="name"}; "metric/name" is another counter of
    # millrace_common/metrics.py with that label.
    counters: dict[str, float] = {}
    step_times: tuple[float, ...] = ()  # those of StepTimes; none: not measured


class Events(msgspec.Struct, tag=True):
    """The events of one engine step, in order. Sent as one message."""

    outputs: list[SequenceOutput] = []
    chunks: list[KvChunk] = []
    reserved: list[KvReserved] = []
    waits: list[Wait] = []
    load: Load | None = None
    cache: CacheChange | None = None

    def __bool__(self) -> bool:
        return bool(self.outputs or self.chunks or self.reserved or self.waits or self.cache)


SchedulerInput = Submit | Abort | KvOffered | KvArrived | KvFailed | KvLate | ServePrefix | LeaseEnded | FlushCache
EngineInput = SchedulerInput | Pause
