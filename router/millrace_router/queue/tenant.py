"""The caller of a request: its tenant, with rights, rates and what it runs, and its trace. Pure; the clock is the
caller's.
"""

import math
from contextvars import ContextVar
from dataclasses import dataclass, field

from millrace_common.reasons import Reason
from millrace_common.split import Slo
from millrace_rpc.errors import FieldError, MillraceError

ROUNDING = 1e-6
BYTES_PER_TOKEN = 4  # of a text
NO_LIMITS = Slo()


@dataclass(slots=True)
class Bucket:
    """A token bucket. `level` grows by `rate` per second up to `burst`. Amounts that are known only afterwards (the
    tokens of an answer) may overdraw it; then nothing is given until the debt is paid.
    """

    rate: float
    burst: float
    at: float  # when `level` was right
    level: float = math.inf  # of a new bucket: full

    def resize(self, rate: float, burst: float, now: float) -> None:
        """Change rate and burst; the present level is kept."""
        self._fill(now)
        self.level += burst - self.burst
        self.rate, self.burst = rate, burst

    def wait_for(self, amount: float, now: float) -> float:
        """Seconds until `amount` is there; 0: now. An amount above the burst is given from a full bucket."""
        self._fill(now)
        missing = min(amount, self.burst) - self.level
        return missing / self.rate if missing > ROUNDING else 0.0

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self.level -= amount

    def _fill(self, now: float) -> None:
        self.level = min(self.burst, self.level + max(now - self.at, 0.0) * self.rate)
        self.at = max(now, self.at)


@dataclass(slots=True)
class Running:
    """What a tenant runs, in the queue too, and how much it may. Every choice of a request counts as one."""

    max_concurrent: int | None = None  # requests
    max_tokens: int | None = None  # of prompts, and the most that the outputs may have
    requests: int = 0
    tokens: int = 0

    def check(self, tenant: str, requests: int, tokens: int) -> None:
        """Raise unless so many more fit: INVALID_ARGUMENT if they never will, RATE_LIMITED if they do not now."""
        for have, more, most, name, what, param in (
            (self.requests, requests, self.max_concurrent, "max_concurrent", "requests", "n"),
            (self.tokens, tokens, self.max_tokens, "max_tokens_in_flight", "tokens", "max_tokens"),
        ):
            if most is None or have + more <= most:
                continue
            limit = f"{name} of {tenant} is {most}"
            if more > most:
                raise FieldError(param, f"asks for too much: {limit}, and this needs {more} {what} at once")
            raise MillraceError(Reason.RATE_LIMITED, f"{limit}: {have} {what} run, and this needs {more}")

    def add(self, requests: int, tokens: int) -> None:
        """Count what begins; negative: what has ended."""
        self.requests += requests
        self.tokens += tokens


@dataclass(slots=True, eq=False)
class Tenant:
    """A caller's rights, and the rest of its rates."""

    name: str = "default"
    weight: float = 1.0
    priority: int | None = None  # None: any
    requests: Bucket | None = None
    tokens: Bucket | None = None
    cache_group: str = ""  # its requests share cached pages with those of equal groups
    running: Running = field(default_factory=Running)
    slo: Slo = NO_LIMITS  # its own limits, which take the place of the router's

    def check(self, now: float, requests: int = 1, tokens: int = 0) -> None:
        """Raise RATE_LIMITED unless another request of so many choices may begin. `tokens`: of all of them, prompts
        and the longest outputs.
        """
        self.running.check(self.name, requests, tokens)
        for bucket, what in ((self.requests, "requests"), (self.tokens, "tokens")):
            wait = bucket.wait_for(1, now) if bucket is not None else 0.0
            if bucket is not None and wait > 0:
                message = f"{self.name} is limited to {bucket.rate:g} {what} per second"
                raise MillraceError(Reason.RATE_LIMITED, message, retry_after_s=math.ceil(wait * 1000) / 1000)

    def begin(self, prompt_tokens: int, now: float) -> None:
        """Count a checked request that begins."""
        if self.requests is not None:
            self.requests.take(1, now)
        self.spend(prompt_tokens, now)

    def take(self, now: float) -> None:
        """Count a request that needs no worker. Raises RATE_LIMITED."""
        self.check(now, requests=0)
        self.begin(0, now)

    def refused(self, error: MillraceError, size: int, now: float) -> None:
        """Count a request of `size` bytes if it has a mistake: to find it took as long as to begin one."""
        if error.row.http in (400, 404, 413):
            self.begin(size // BYTES_PER_TOKEN, now)

    def give_back(self, prompt_tokens: int, now: float, *, request: bool) -> None:
        """Take back from `begin` what no worker took. `request`: the whole request."""
        if request and self.requests is not None:
            self.requests.take(-1, now)
        self.spend(-prompt_tokens, now)

    def spend(self, tokens: int, now: float) -> None:
        if self.tokens is not None:
            self.tokens.take(tokens, now)

    def limits(self, usual: Slo) -> Slo:
        """Its requests' limits; `usual`: the router's."""
        own = self.slo
        return Slo(
            own.ttft_s if own.ttft_s < math.inf else usual.ttft_s, own.tpot_s if own.tpot_s < math.inf else usual.tpot_s
        )

    def allowed(self, priority: int) -> int:
        """The priority that a request of this caller gets."""
        return priority if self.priority is None else min(priority, self.priority)


DEFAULT = Tenant()


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of the current request, as the guard of its port determined it."""

    tenant: Tenant = DEFAULT
    traceparent: str = ""  # W3C, checked; empty: the trace begins here


caller: ContextVar[Caller] = ContextVar("millrace_caller", default=Caller())  # noqa: B039 - nothing changes it
