"""All rules as Prometheus reads them."""

from __future__ import annotations

from typing import Any

from millrace_dashboards.alert import RUNBOOKS, Alert, Deployment, Thresholds
from millrace_dashboards.rules import gpus, processes, recorded, service, transfer

GPUS = "millrace-gpus"  # the chart leaves it out without monitoring.dcgm
VLLM = "millrace-vllm-names"  # and this one without monitoring.vllmNames


def groups(t: Thresholds | None = None, of: Deployment | None = None) -> dict[str, tuple[Alert, ...]]:
    """All alerts, by the name of their group."""
    t, of = t or Thresholds(), of or Deployment()
    now, lately = of.scope(t.window), of.scope(t.long_window)
    return {
        "millrace-service": (*service.routers(now), *service.failures(t, now), *service.latency(t, now)),
        "millrace-transfer": (*transfer.transfers(t, now), *transfer.pages(t, now)),
        "millrace-processes": (
            *processes.workers(t, now),
            *processes.watching(t, now, lately),
            *processes.pauses(t, now),
        ),
        GPUS: gpus.alerts(t),
    }


def recordings(of: Deployment | None = None) -> dict[str, dict[str, str]]:
    """Names and expressions that are recorded, by the name of their group."""
    now = (of or Deployment()).scope(Thresholds().window)
    return {"millrace-scaling": recorded.scaling(now), VLLM: recorded.vllm(now)}


def to_json(t: Thresholds | None = None, runbooks: str = RUNBOOKS, of: Deployment | None = None) -> dict[str, Any]:
    """A rule file of Prometheus, and the `spec` of a PrometheusRule."""
    t = t or Thresholds()
    recording = [
        {"name": name, "rules": [{"record": record, "expr": expr} for record, expr in rules.items()]}
        for name, rules in recordings(of).items()
    ]
    alerting = [
        {"name": name, "rules": [alert.to_json(t.patience, runbooks) for alert in alerts]}
        for name, alerts in groups(t, of).items()
    ]
    return {"groups": [*recording, *alerting]}
