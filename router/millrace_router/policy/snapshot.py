"""The inputs and the result of a choice. Everything here is immutable."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from millrace_common.split import Slo
from millrace_common.step_times import StepTimes

Key = tuple[str, int]  # a replica: its worker's address, and its index there
UNLIMITED = 1 << 62  # tokens
NO_LABELS: Mapping[str, str] = MappingProxyType({})
MOST_CHUNK = 2048  # prompt tokens of a step
NO_LIMITS, NOT_MEASURED = Slo(), StepTimes()


@dataclass(frozen=True, slots=True)
class Replica:
    """One attention-data-parallel unit of a routable worker, with all that was sent since the worker's last report."""

    address: str
    index: int
    epoch: str
    fingerprint: str
    capacity: int  # further requests it takes
    tokens: int  # prompt tokens waiting to be computed
    sequences: int  # running, waiting and importing
    sources: frozenset[str] = frozenset()  # decode: epochs of the prefill workers it has been warmed with
    held: int = 0  # tokens whose KV its running sequences hold: what each decode step reads
    room: int = UNLIMITED  # tokens of further requests: ReplicaLoad.room, less those that were sent since
    expected_output: int = 0  # tokens of an output, where max_tokens allows as many
    context: int = UNLIMITED  # tokens of the longest request that it can run, prompt and output
    labels: Mapping[str, str] = field(default_factory=lambda: NO_LABELS, compare=False)  # of its worker: zone, …
    revision: str = ""  # of its worker
    excluded: str = ""  # why it gets nothing although it could
    page_bytes: int = 0
    # Measured by its worker; 0: not yet
    output_tokens_per_s: float = 0.0  # of one sequence
    read_bytes_per_s: float = 0.0  # of KV from other workers
    prefix_fetch_s: float = 0.0  # of fetching a prefix, beside the reads
    times: StepTimes = NOT_MEASURED
    free_slots: int = UNLIMITED  # further sequences that would run at once; below 1, one waits for another's end
    streams: int = 0  # sequences that have or will get decode steps here
    flexible: bool = False  # its worker runs whatever it gets; the view has it where its duty puts it

    @property
    def key(self) -> Key:
        return self.address, self.index

    @property
    def process(self) -> tuple[str, int]:
        """The owner of a prefix cache, which ends with the process."""
        return self.epoch, self.index

    @property
    def load(self) -> int:
        """Tokens of work."""
        return self.tokens + self.held


@dataclass(frozen=True, slots=True)
class View:
    """All routable replicas of one model by role, each role in order of key. A flexible worker's duty is its role."""

    prefill: tuple[Replica, ...] = ()
    decode: tuple[Replica, ...] = ()
    unified: tuple[Replica, ...] = ()
    first: str | None = None  # the revision that is asked before all others; None: they are alike

    def roomiest(self, want: "PlacementRequest") -> str:
        """The address of the worker that will soonest have room for an output of `want`; empty: none will."""
        replicas = (r for r in (*self.decode, *self.unified) if want.tokens + want.outputs <= r.context)
        return max(((r.room, r.address) for r in replicas if not r.excluded), default=(0, ""))[1]


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """One attempt of one continuation."""

    tokens: int  # length of the prompt, replayed outputs included
    outputs: int = 2  # tokens, at most
    least: int = 0  # of these that it gets in any case
    slo: Slo = NO_LIMITS
    avoid: frozenset[str] = frozenset()  # addresses of workers that failed this request before
    kept: str = ""  # address of a worker whose room an earlier request waits for
    weights: str = ""  # of the model that has begun the answer: no other may continue it; empty: no output yet
    version: str = ""  # of these weights, for errors
    session: str = ""  # requests of one session share a prefix; empty: unknown
    pages: tuple[bytes, ...] = ()  # blocks of the prompt's full pages; empty when no policy looks at them
    page_size: int = 64  # tokens
    draw: int = 0  # u64, random: what the randomised policies draw from
    request_id: str = ""
    attempt: int = 0

    @property
    def prefill_only(self) -> bool:
        """One more token ends it: nothing to hand over."""
        return self.outputs == 1

    def cached(self, pages: float) -> int:
        """Tokens that a worker with the first `pages` pages need not compute; at least one token is always computed."""
        return int(min(pages, (self.tokens - 1) // self.page_size) * self.page_size)

    def uncached(self, pages: float) -> int:
        return self.tokens - self.cached(pages)


class Pace(NamedTuple):
    """Of all workers that generate outputs."""

    running: int  # requests
    token_s: float  # seconds of one output token of each, at the fastest worker; 0: not measured


class PrefixFetch(NamedTuple):
    """Leading pages of a prompt that a prefill replica could fetch."""

    source: Replica
    num_pages: int  # leading pages there
    missing: int  # prompt tokens in those of them that the fetching worker lacks
    fetch_s: float
    compute_s: float

    @property
    def worthwhile(self) -> bool:
        return self.fetch_s < self.compute_s


@dataclass(frozen=True, slots=True)
class Placement:
    """One of the two is there at least. A decode replica without a prefill replica runs both phases."""

    prefill: Replica | None
    decode: Replica | None
    prefix_fetch: PrefixFetch | None = None  # that the prefill replica could take, worthwhile or not
