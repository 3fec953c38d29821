"""Token buckets: what an API key may take per second, with bursts. Pure; the clock is the caller's."""

from __future__ import annotations

from dataclasses import dataclass

ROUNDING = 1e-6


@dataclass(slots=True)
class Bucket:
    """`level` grows by `rate` per second up to `burst`. Amounts that are known only afterwards (the tokens of an
    answer) may overdraw it; then nothing is given until the debt is paid.
    """

    rate: float
    burst: float
    level: float
    at: float  # when `level` was right

    @classmethod
    def full(cls, rate: float, burst: float, now: float) -> Bucket:
        return cls(rate, burst, burst, now)

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
