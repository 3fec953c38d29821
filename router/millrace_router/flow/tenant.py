"""The caller of a request: its tenant, with rights and rates, and its trace. Pure; the clock is the caller's."""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass

from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

ROUNDING = 1e-6


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


@dataclass(slots=True, eq=False)
class Tenant:
    """A caller's rights, and the rest of its rates."""

    name: str = "default"
    weight: float = 1.0
    priority: int | None = None  # None: any
    requests: Bucket | None = None
    tokens: Bucket | None = None
    cache_group: str = ""  # its requests share cached pages with those of equal groups

    def check(self, now: float) -> None:
        """Raise RATE_LIMITED, with the time to wait, unless another request may begin."""
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

    def refused(self, prompt_tokens: int, now: float) -> None:
        """Count a request with a mistake: to find it took as long as to begin one."""
        self.begin(prompt_tokens, now)

    def give_back(self, prompt_tokens: int, now: float, *, request: bool) -> None:
        """Take back from `begin` what no worker took. `request`: the whole request."""
        if request and self.requests is not None:
            self.requests.take(-1, now)
        self.spend(-prompt_tokens, now)

    def spend(self, tokens: int, now: float) -> None:
        if self.tokens is not None:
            self.tokens.take(tokens, now)

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
