"""What clients feel."""

from __future__ import annotations

from millrace_rpc.errors import TABLE

from millrace_dashboards.alert import BY_POD, WHERE, Alert, Thresholds
from millrace_dashboards.promql import Scope, largest, number, ratio, smallest, total

NAMED = "{{ $labels.model }}, release {{ $labels.release }} in {{ $labels.namespace }}"
SERVER_FAULTS = "~" + "|".join(sorted(reason.lower() for reason, row in TABLE.items() if row.http >= 500))


def routers(now: Scope) -> tuple[Alert, ...]:
    """Whether anybody answers at all."""
    workers = now.gauge("workers")
    return (
        Alert(
            "RoutersGone",
            f"{NAMED}: no router has metrics. All are gone, or Prometheus no longer scrapes them.",
            f"{number(workers, *WHERE)} or absent({workers}) - 1",  # 0 where there is none
            0,
            "3m",
            "critical",
            sign="==",
        ),
        Alert(
            "RouterDown",
            "{{ $labels.pod }}: this router does not answer Prometheus.",
            smallest(now.up(component="router"), *BY_POD),
            0,
            "5m",
            by=BY_POD,
            sign="==",
        ),
        Alert(
            "NotReady",
            f"{NAMED}: no router has a pair of workers to send requests to.",
            largest(now.gauge("workers", state="routable"), *WHERE),
            0,
            "2m",
            "critical",
            sign="==",
        ),
    )


def failures(t: Thresholds, now: Scope) -> tuple[Alert, ...]:
    """Requests that fail, and attempts that do."""
    ended = total(now.rate("requests"), *WHERE)
    faults = ratio(total(now.rate("requests", status=SERVER_FAULTS), *WHERE), ended)
    faults = f"{faults} or 0 * {ended}"
    share = "{{ $value | humanizePercentage }}"
    fail = f"{NAMED}: {share} of the requests fail."
    return (
        Alert("Errors", fail, faults, t.errors, "10m", unit="percentunit"),
        Alert("ManyErrors", fail, faults, t.many_errors, "5m", "critical", unit="percentunit"),
        Alert(
            "Retries",
            f"{NAMED}: {share} of the attempts fail and are retried.",
            f"{ratio(total(now.rate('retries'), *WHERE), total(now.rate('decisions'), *WHERE))} or 0 * {ended}",
            t.retries,
            "10m",
            unit="percentunit",
        ),
        Alert(
            "RetryBudgetEmpty",
            f"{NAMED}: so many attempts fail that routers no longer retry.",
            total(now.rate("retries_refused"), *WHERE),
            0,
        ),
    )


def latency(t: Thresholds, now: Scope) -> tuple[Alert, ...]:
    """Late answers, and requests that wait or are refused."""
    ended = total(now.rate("requests"), *WHERE)
    took = "{{ $value | humanizeDuration }}"
    return (
        Alert(
            "FirstTokenSlow",
            f"{NAMED}: the 99th percentile of the time to the first token is {took}.",
            now.quantile(0.99, "stage", *WHERE, stage="first_token"),
            t.ttft,
            "10m",
            unit="s",
        ),
        Alert(
            "TokensSlow",
            f"{NAMED}: the 99th percentile of the time between tokens is {took}.",
            now.quantile(0.99, "itl", *WHERE),
            t.inter_token,
            "10m",
            unit="s",
        ),
        Alert(
            "QueueGrows",
            f"{NAMED}: requests wait, and their number grows.",
            total(now.slope("queued"), *WHERE),
            0,
            "10m",
            guard=f"{total(now.lowest('queued'), *WHERE)} > 0",
        ),
        Alert(
            "RequestsRefused",
            f"{NAMED}: the queue is full or too slow; {{{{ $value | humanize }}}} requests per second are refused.",
            f"{total(now.rate('requests', status='~queue_full|deadline_too_short'), *WHERE)} or 0 * {ended}",
            0,
        ),
    )
