"""Workers, routers, and the things that they need."""

from __future__ import annotations

from millrace_dashboards.alert import BY_POD, BY_ROLE, WHERE, Alert, Thresholds
from millrace_dashboards.promql import Scope, largest, number, total
from millrace_dashboards.rules.service import NAMED

ROLES = "~prefill|decode|unified"
# Longer than the pause between two starts of a container (5 minutes) and the time until it is scraped again.
GAP = "15m"


def workers(t: Thresholds, now: Scope) -> tuple[Alert, ...]:
    """Workers that do not work."""
    known = largest(now.gauge("workers", role=ROLES, state="discovered"), *BY_ROLE)
    routable = largest(now.gauge("workers", role=ROLES, state="routable"), *BY_ROLE)
    # A pod that a group or a StatefulSet makes again has the old name and another address, so it is another series.
    starts = Scope(now.matchers, t.restart_window).changes("started")
    return (
        Alert(
            "WorkersNotRoutable",
            f"{NAMED}: {{{{ $value }}}} {{{{ $labels.role }}}} workers get no requests.",
            f"{known} - {routable}",
            0,
            "30m",
            by=BY_ROLE,
        ),
        Alert(
            "WorkersShunned",
            f"{NAMED}: {{{{ $labels.role }}}} workers fail or are slow.",
            largest(now.gauge("ejected"), *BY_ROLE),
            0,
            "10m",
            by=BY_ROLE,
        ),
        Alert(
            "WorkerNotReady",
            "{{ $labels.pod }} has not been READY for longer than a start may take.",
            largest(Scope(now.matchers, GAP).highest("state", state="ready"), *BY_POD),
            0,
            "1h",  # the chart: the longest `startup` of the pools
            by=BY_POD,
            sign="==",
        ),
        Alert(
            "Restarts",
            f"{{{{ $labels.pod }}}} has started {{{{ $value }}}} times again within {t.restart_window}.",
            f"{total(starts, *BY_POD)} + {number(starts, *BY_POD)} - 1",
            t.restarts,
            "0m",
            by=BY_POD,
            sign=">=",
        ),
    )


def watching(t: Thresholds, now: Scope, lately: Scope) -> tuple[Alert, ...]:
    """Alerts about their surroundings: Prometheus, the API server, mounted files."""
    routable = total(largest(now.gauge("workers", role=ROLES, state="routable"), *BY_ROLE), *WHERE)
    seen = number(now.gauge("state", state="ready"), *WHERE)
    return (
        Alert(
            "MetricsMissing",
            f"{NAMED}: {{{{ $value }}}} workers serve and are not scraped.",
            f"{routable} - ({seen} or 0 * {routable})",
            0,
        ),
        Alert(
            "DiscoveryStale",
            "{{ $labels.pod }}: no list of workers for {{ $value | humanizeDuration }}.",
            f"time() - {largest(now.gauge('discovery_synced'), *BY_POD)}",
            t.discovery_age,
            "0m",
            guard=f"{total(lately.increase('discovery_troubles'), *BY_POD)} > 0",
            by=BY_POD,
            unit="s",
        ),
        Alert(
            "FilesNotUsed",
            "{{ $labels.pod }}: changed {{ $labels.what }} cannot be used.",
            total(lately.increase("reloads", outcome="failed"), *BY_POD, "what"),
            0,
            "0m",
            by=(*BY_POD, "what"),
        ),
    )


def pauses(t: Thresholds, now: Scope) -> tuple[Alert, ...]:
    """What stops a whole Python process."""
    serves = total(now.gauge("workers", state="routable"), *BY_POD)
    ready = total(now.gauge("state", state="ready"), *BY_POD)
    started = number(now.gauge("started"), *BY_POD)
    frozen = number(now.gauge("gc_frozen", process="~frontend|router"), *BY_POD)
    return (
        Alert(
            "GcPauses",
            f"{{{{ $labels.pod }}}} ({{{{ $labels.process }}}}): collections pause it for more than {t.gc_pause:g} s.",
            now.beyond(t.gc_pause, "gc_pause", *BY_POD, "process"),
            0,
            by=(*BY_POD, "process"),
        ),
        Alert(
            "GcNotFrozen",
            "{{ $labels.pod }} serves without a GC freeze.",
            f"{started} - {frozen} or {started}",
            0,
            "10m",
            guard=f"{serves} > 0 or {ready} > 0",
            by=BY_POD,
        ),
        Alert(
            "EventLoopLags",
            "{{ $labels.pod }}: its event loop is {{ $value | humanizeDuration }} late.",
            now.quantile(0.99, "loop_lag", *BY_POD),
            t.loop_lag,
            by=BY_POD,
            unit="s",
        ),
    )
