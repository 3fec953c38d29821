"""All rules as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace_dashboards.alert import Alert, Deployment, Thresholds
from millrace_dashboards.promql import Scope
from millrace_dashboards.rules import gpus, processes, recorded, service, transfer

GPUS = "millrace-gpus"  # the chart leaves it out without monitoring.dcgm
VLLM = "millrace-vllm-names"  # and this one without monitoring.vllmNames
DEFAULTS, PLACEHOLDERS = Thresholds(), Deployment().matchers


def groups(t: Thresholds = DEFAULTS, matchers: str = PLACEHOLDERS) -> dict[str, tuple[Alert, ...]]:
    """All alerts, by the name of their group. `matchers`: of the deployments that they are about."""
    now, lately = Scope(matchers, t.window), Scope(matchers, t.long_window)
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


def recordings(matchers: str = PLACEHOLDERS) -> dict[str, dict[str, str]]:
    """Names and expressions that are recorded, by the name of their group."""
    now = Scope(matchers, DEFAULTS.window)
    return {"millrace-scaling": recorded.scaling(now), VLLM: recorded.vllm(now)}


def to_json(t: Thresholds, runbooks: str, of: Deployment, panels: Mapping[str, str]) -> dict[str, Any]:
    """A rule file of Prometheus, and the `spec` of a PrometheusRule. `panels`: title of an alert → URL of its panel."""
    recording = [
        {"name": name, "rules": [{"record": record, "expr": expr} for record, expr in rules.items()]}
        for name, rules in recordings(of.matchers).items()
    ]
    alerting = [
        {"name": name, "rules": [alert.to_json(panels[alert.title], runbooks, t.patience) for alert in alerts]}
        for name, alerts in groups(t, of.matchers).items()
    ]
    return {"groups": [*recording, *alerting]}
