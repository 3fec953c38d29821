"""All dashboards, one file each."""

from __future__ import annotations

from millrace_dashboards.alert import Thresholds
from millrace_dashboards.boards import alerts, gc, kv_transfer, overview, router, waterfall, workers
from millrace_dashboards.grafana import Dashboard


def dashboards(t: Thresholds) -> tuple[Dashboard, ...]:
    own = (overview, waterfall, kv_transfer, router, workers, gc)
    return (*(module.DASHBOARD for module in own), alerts.board(t))
