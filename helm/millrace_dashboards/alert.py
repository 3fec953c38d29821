"""What an alert rule is made of: a value, a condition on it, and often a guard. It fires while the condition holds and
the guard is not empty. Values have data on a healthy system as well, so a test can tell a quiet rule from a broken one.

    expr = (value) condition and on (namespace, model) (guard)

Deployments are told apart by the labels `namespace` and `model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

WHERE = ("namespace", "model")
RUNBOOKS = "docs/operations.md"
Severity = Literal["critical", "warning"]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What the rules compare with. Shares are 0 to 1. Times in seconds, windows as Prometheus writes them."""

    window: str = "5m"  # of rates
    long_window: str = "30m"  # of what is rare
    patience: str | None = None  # how long a condition must hold; none: as each rule says
    ttft: float = 5.0  # p99
    inter_token: float = 0.25  # p99
    errors: float = 0.05
    many_errors: float = 0.2
    retries: float = 0.05
    kv_bytes_per_second: float = 5e9  # of one read; what is slower is likely TCP
    pages_in_use: float = 0.95
    gc_pause: float = 0.1  # a bound of the histogram
    loop_lag: float = 0.25  # p99
    discovery_age: float = 600.0
    restarts: int = 3  # in the long window


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    summary: str  # one line, with {{ $labels.… }}
    value: str
    condition: str
    patience: str = "5m"
    severity: Severity = "warning"
    guard: str = ""
    on: tuple[str, ...] = WHERE  # labels that value and guard have in common
    runbook: str = ""  # heading of the guide, as an anchor

    @property
    def expr(self) -> str:
        guard = f" and on ({', '.join(self.on)}) ({self.guard})" if self.guard else ""
        return f"({self.value}) {self.condition}{guard}"

    def to_json(self, patience: str | None = None, runbooks: str = RUNBOOKS) -> dict[str, Any]:
        return {
            "alert": f"Millrace{self.name}",
            "expr": self.expr,
            "for": patience or self.patience,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook_url": f"{runbooks}#{self.runbook}"},
        }
