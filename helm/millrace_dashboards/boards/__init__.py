"""All dashboards, one file each."""

from __future__ import annotations

from millrace_dashboards.boards import gc, kv_transfer, overview, router, waterfall, workers
from millrace_dashboards.grafana import Dashboard

DASHBOARDS: tuple[Dashboard, ...] = (
    overview.DASHBOARD,
    waterfall.DASHBOARD,
    kv_transfer.DASHBOARD,
    router.DASHBOARD,
    workers.DASHBOARD,
    gc.DASHBOARD,
)
