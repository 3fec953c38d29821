"""What several dashboards show."""

from __future__ import annotations

from millrace_dashboards.grafana import Query
from millrace_dashboards.promql import Scope


def quantiles(scope: Scope, attr: str, **labels: str) -> tuple[Query, ...]:
    """Median, 90th and 99th percentile."""
    return tuple(Query(scope.quantile(q, attr, **labels), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99))
