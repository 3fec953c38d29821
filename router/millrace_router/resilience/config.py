"""The section `resilience` of the router's configuration. Times are in seconds."""

from __future__ import annotations

from millrace_common.config import Config
from pydantic import Field


class RetryBudget(Config):
    ratio: float = Field(1.0, ge=0)  # retries per request alive in the window; 1: every worker may die once
    per_s: float = Field(5.0, ge=0)  # retries that are always allowed, so that a few requests can be retried too


class OutlierRules(Config):
    """A worker is compared with the median of the others of its role."""

    consecutive: int = Field(5, ge=1)  # failures in a row that eject a worker, however its peers do
    failures: float = Field(0.3, gt=0, le=1)  # failure ratio above the others' median by so much
    slower: float = Field(5.0, gt=1)  # first outputs take so many times as long as the others'
    pause: float = Field(10.0, gt=0)  # length of an ejection, times the number of ejections so far
    share: float = Field(0.5, ge=0, lt=1)  # of a role, rounded down, that comparisons may eject at the same time


class Resilience(Config):
    retries: RetryBudget = RetryBudget()
    outliers: OutlierRules = OutlierRules()
