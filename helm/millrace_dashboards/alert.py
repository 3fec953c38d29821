"""What an alert rule is made of: a value, a condition on it, and often a guard. It fires while the condition holds and
the guard is not empty. Values have data on a healthy system as well, so a test can tell a quiet rule from a broken one.

    expr = (value) condition and on (labels of the value) (guard)

Rules are of one deployment, which the labels `namespace`, `model` and `release` name. The chart writes them in place
of placeholders.
"""

from dataclasses import dataclass
from typing import Any, Literal

from millrace_dashboards.promql import WHERE

RUNBOOKS = "docs/alerts"  # folder with a page per alert
Severity = Literal["critical", "warning"]
Unit = Literal["short", "s", "reqps", "ops", "percentunit", "bytes", "Bps", "dateTimeFromNow"]  # Grafana's names


@dataclass(frozen=True, slots=True)
class Deployment:
    """Whose rules they are. The defaults are what the chart replaces."""

    namespace: str = "__NAMESPACE__"
    model: str = "__MODEL__"
    release: str = "__RELEASE__"

    @property
    def matchers(self) -> str:
        return ",".join(f'{label}="{getattr(self, label)}"' for label in WHERE)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What the rules compare with. Shares are 0 to 1. Times in seconds, windows as Prometheus writes them."""

    window: str = "5m"  # of rates
    long_window: str = "30m"  # of what is rare
    restart_window: str = "2h"  # a worker may load for half an hour before it dies again
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
    restarts: int = 3  # in the restart window
    gpu_clock: float = 0.8  # share of the fastest GPU of the node


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    summary: str  # one line, with {{ $labels.… }}
    value: str
    limit: float = 0
    patience: str = "5m"
    severity: Severity = "warning"
    guard: str = ""
    by: tuple[str, ...] = WHERE  # labels of the value; the guard has them too
    unit: Unit = "short"
    sign: Literal[">", ">=", "<", "=="] = ">"

    @property
    def title(self) -> str:
        return f"Millrace{self.name}"

    @property
    def condition(self) -> str:
        return f"{self.sign} {self.limit:g}"

    @property
    def expr(self) -> str:
        guard = f" and on ({', '.join(self.by)}) ({self.guard})" if self.guard else ""
        return f"({self.value}) {self.condition}{guard}"

    def to_json(self, panel: str, runbooks: str = RUNBOOKS, patience: str | None = None) -> dict[str, Any]:
        """`panel`: URL of the panel that draws the value; the deployment is added to it."""
        of = "".join(f"&var-{label}={{{{ $labels.{label} | urlquery }}}}" for label in WHERE if label in self.by)
        return {
            "alert": self.title,
            "expr": self.expr,
            "for": patience or self.patience,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "runbook_url": f"{runbooks}/{self.title}.md",
                "dashboard_url": panel + of,
            },
        }
