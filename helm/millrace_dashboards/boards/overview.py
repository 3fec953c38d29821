"""The state of the system, and where to look next."""

from __future__ import annotations

from millrace_dashboards.alert import Unit
from millrace_dashboards.boards.common import quantiles
from millrace_dashboards.grafana import VIEW, Dashboard, Panel, Query, Row
from millrace_dashboards.promql import largest, ratio, total
from millrace_dashboards.rules.service import SERVER_FAULTS


def _stat(title: str, description: str, unit: Unit, expr: str, *alerts: str) -> Panel:
    return Panel(title, description, unit, (Query(expr, title),), "stat", width=4, height=4, alerts=alerts)


NOW = Row(
    "Now",
    (
        _stat("Requests", "Requests that ended, per second.", "reqps", total(VIEW.rate("requests"))),
        _stat(
            "Server errors",
            "Share of requests that ended with a server error (HTTP 5xx). Refused and cancelled ones do not count.",
            "percentunit",
            ratio(f"({total(VIEW.rate('requests', status=SERVER_FAULTS))} or vector(0))", total(VIEW.rate("requests"))),
            "Errors",
            "ManyErrors",
        ),
        _stat(
            "TTFT p99",
            "From the request's arrival at the router to its first token.",
            "s",
            VIEW.quantile(0.99, "stage", stage="first_token"),
            "FirstTokenSlow",
        ),
        _stat(
            "Inter-token p99",
            "Between two batches of tokens of one stream.",
            "s",
            VIEW.quantile(0.99, "itl"),
            "TokensSlow",
        ),
        _stat("Output tokens", "Tokens generated per second.", "ops", total(VIEW.rate("tokens", direction="output"))),
        _stat("Waiting", "Requests in the routers' queues.", "short", total(VIEW.gauge("queued"))),
    ),
)
TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Requests by how they ended",
            "`ok`, or the reason of the error table in lower case.",
            "reqps",
            (Query(total(VIEW.rate("requests"), "status"), "{{status}}"),),
            stacked=True,
        ),
        Panel(
            "Tokens",
            "Prompt tokens of admitted requests, and output tokens.",
            "ops",
            (Query(total(VIEW.rate("tokens"), "direction"), "{{direction}}"),),
        ),
        Panel(
            "Requests at work",
            "Active: admitted and not ended. Waiting: the part of them that has no workers yet.",
            "short",
            (Query(total(VIEW.gauge("active")), "active"), Query(total(VIEW.gauge("queued")), "waiting")),
        ),
    ),
)
LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "Seen by the router.",
            "s",
            quantiles(VIEW, "stage", stage="first_token"),
            alerts=("FirstTokenSlow",),
        ),
        Panel(
            "Between tokens",
            "Between two batches of tokens of one stream.",
            "s",
            quantiles(VIEW, "itl"),
            alerts=("TokensSlow",),
        ),
        Panel("Whole request", "From arrival to the last token.", "s", quantiles(VIEW, "stage", stage="total")),
    ),
)
CAPACITY = Row(
    "Capacity",
    (
        Panel(
            "Routable workers",
            "Workers that get requests. If routers differ, the highest number counts.",
            "short",
            (Query(largest(VIEW.gauge("workers", state="routable"), "role"), "{{role}}"),),
            alerts=("NotReady",),
        ),
        Panel(
            "KV pages in use",
            "Share of the pages that are neither free nor evictable from the prefix cache.",
            "percentunit",
            (
                Query(
                    ratio(
                        total(VIEW.gauge("pages", use="~running|published"), "component"),
                        total(VIEW.gauge("pages"), "component"),
                    ),
                    "{{component}}",
                ),
            ),
        ),
        Panel(
            "Prompt tokens to be computed",
            "Waiting in the routers, and already sent to workers. Prefill scales by it.",
            "short",
            (
                Query(total(VIEW.gauge("queued_tokens")), "router"),
                Query(total(VIEW.gauge("waiting_tokens"), "component"), "{{component}}"),
            ),
            stacked=True,
        ),
    ),
)
DASHBOARD = Dashboard(
    "overview", "Overview", "The state of the system, and where to look next.", (NOW, TRAFFIC, LATENCY, CAPACITY)
)
