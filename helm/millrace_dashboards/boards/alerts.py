"""A panel for each alert, with its value and its limit: made from the rules."""

from __future__ import annotations

from millrace_dashboards import alerts
from millrace_dashboards.alert import WHERE, Alert, Thresholds
from millrace_dashboards.grafana import CHOSEN, Dashboard, Panel, Query, Row

TITLES = dict(zip(alerts.groups(), ("Service", "KV pages", "Processes", "GPUs"), strict=True))


def board(t: Thresholds) -> Dashboard:
    return Dashboard(
        "alerts",
        "Alerts",
        "Value and limit of every alert. Rules have no choice of pods, and so it has none.",
        tuple(
            Row(TITLES[name], tuple(_panel(alert) for alert in group))
            for name, group in alerts.groups(t, CHOSEN).items()
        ),
        variables=(),
    )


def _panel(alert: Alert) -> Panel:
    guard = f" and this has one: `{alert.guard}`" if alert.guard else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in alert.by if label not in WHERE[:2])
    return Panel(
        alert.title,
        f"Fires ({alert.severity}) while the value is {alert.condition}{guard}.",
        alert.unit,
        (Query(alert.value, legend),),
        width=6,
        height=6,
        alerts=(alert.name,),
    )
