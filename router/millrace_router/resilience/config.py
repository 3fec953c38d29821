"""The section `resilience` of the router's configuration. Times are in seconds."""

from __future__ import annotations

from millrace_common.config import Config
from pydantic import Field


class RetryBudget(Config):
    window: float = Field(10.0, gt=0)
    ratio: float = Field(1.0, ge=0)  # further attempts per request alive in the window; 1: every worker may die once
    per_s: float = Field(5.0, ge=0)  # that are always allowed, so that a few requests can be retried too


class BreakerRules(Config):
    consecutive: int = Field(5, ge=1)  # failures in a row that open it
    ratio: float = Field(0.5, gt=0, le=1)  # or this share of failures, of at least
    least: int = Field(20, ge=1)  # outcomes within
    window: float = Field(10.0, gt=0)
    pause: float = Field(2.0, gt=0)  # how long it stays open at first; doubles each time it opens again
    longest_pause: float = Field(60.0, gt=0)
    probes: int = Field(2, ge=1)  # single requests that must succeed before it closes
    probe: float = Field(5.0, gt=0)  # the next probe comes no later, whatever became of the last one


class OutlierRules(Config):
    """A worker is compared with the median of the others of its role."""

    window: float = Field(30.0, gt=0)
    least: int = Field(10, ge=1)  # outcomes in the window, before a worker is judged
    failures: float = Field(0.3, gt=0, le=1)  # failure ratio above the others' median by so much
    slower: float = Field(5.0, gt=1)  # first outputs take so many times as long as the others'
    slower_by: float = Field(1.0, ge=0)  # and so much longer, per 1,000 prompt tokens
    pause: float = Field(10.0, gt=0)  # times the number of ejections so far
    longest_pause: float = Field(300.0, gt=0)
    share: float = Field(0.5, ge=0, lt=1)  # of a role, rounded down, that may be ejected at the same time; 0: nobody is


class Resilience(Config):
    retries: RetryBudget = RetryBudget()
    breaker: BreakerRules = BreakerRules()
    outliers: OutlierRules = OutlierRules()
