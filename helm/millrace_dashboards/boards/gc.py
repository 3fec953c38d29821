"""Python's garbage collector: it must not pause a process that serves."""

from __future__ import annotations

from millrace_dashboards.grafana import VIEW, Dashboard, Panel, Query, Row
from millrace_dashboards.promql import largest, total

PAUSES = Row(
    "Pauses",
    (
        Panel(
            "Pauses p99",
            "The longest pauses of each kind of process: router, frontend and rank.",
            "s",
            (Query(VIEW.quantile(0.99, "gc_pause", "process"), "{{process}}"),),
            width=12,
        ),
        Panel(
            "Time in collections",
            "Share of each process's time. A worker's ranks count together.",
            "percentunit",
            (Query(total(VIEW.observed("gc_pause", "sum"), "pod", "process"), "{{pod}} {{process}}"),),
            width=12,
        ),
        Panel(
            "Collections by generation",
            "Generation 2 is the expensive one; frozen objects take no part in it.",
            "ops",
            (
                Query(
                    total(VIEW.observed("gc_pause", "count"), "process", "generation"), "{{process}} gen {{generation}}"
                ),
            ),
            width=12,
        ),
        Panel(
            "Pauses p99 of generation 2",
            "Per pod.",
            "s",
            (Query(VIEW.quantile(0.99, "gc_pause", "pod", "process", generation="2"), "{{pod}} {{process}}"),),
            width=12,
        ),
    ),
)
FROZEN = Row(
    "Freezes",
    (
        Panel(
            "Frozen objects",
            "By the latest freeze, which the routers ask for after every warm-up of a pair.",
            "short",
            (Query(largest(VIEW.gauge("gc_frozen"), "pod", "process"), "{{pod}} {{process}}"),),
        ),
        Panel(
            "Freezes",
            "Since the start. A process without one pauses for its whole heap.",
            "short",
            (Query(largest(VIEW.count("gc_freezes"), "pod", "process"), "{{pod}} {{process}}"),),
        ),
        Panel(
            "Event-loop lag p99",
            "A long pause shows here as well.",
            "s",
            (Query(VIEW.quantile(0.99, "loop_lag", "process"), "{{process}}"),),
            alerts=("EventLoopLags",),
        ),
    ),
)
DASHBOARD = Dashboard(
    "gc", "Garbage collection", "Python's garbage collector: it must not pause a process that serves.", (PAUSES, FROZEN)
)
