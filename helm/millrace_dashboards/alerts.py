"""All alert rules as Prometheus reads them."""

from __future__ import annotations

from typing import Any

from millrace_dashboards import rules
from millrace_dashboards.alert import RUNBOOKS, Alert, Thresholds
from millrace_dashboards.promql import Scope


def groups(t: Thresholds | None = None) -> dict[str, tuple[Alert, ...]]:
    """All rules, by the name of their group."""
    t = t or Thresholds()
    now, lately = Scope(window=t.window), Scope(window=t.long_window)
    return {
        "millrace-service": rules.service(t, now),
        "millrace-transfer": rules.transfer(t, now),
        "millrace-processes": rules.processes(t, now, lately),
    }


def to_json(t: Thresholds | None = None, runbooks: str = RUNBOOKS) -> dict[str, Any]:
    """A rule file of Prometheus, and the `spec` of a PrometheusRule."""
    t = t or Thresholds()
    recorded = [{"record": name, "expr": expr} for name, expr in rules.recorded(Scope()).items()]
    alerting = [
        {"name": name, "rules": [alert.to_json(t.patience, runbooks) for alert in alerts]}
        for name, alerts in groups(t).items()
    ]
    return {"groups": [{"name": "millrace-scaling", "rules": recorded}, *alerting]}
