"""What clients feel."""

from __future__ import annotations

from millrace_dashboards.alert import BY_POD, WHERE, Alert, Thresholds
from millrace_dashboards.boards.common import SERVER_FAULTS
from millrace_dashboards.promql import Scope, largest, number, ratio, smallest, total

NAMED = "{{ $labels.model }} in {{ $labels.namespace }}"


def routers(now: Scope) -> tuple[Alert, ...]:
    """Whether anybody answers at all."""
    workers = now.gauge("workers")
    return (
        Alert(
            "RoutersGone",
            f"{NAMED}: no router has metrics. All are gone, or Prometheus no longer scrapes them.",
            f"{number(workers, *WHERE)} or absent({workers}) - 1",  # 0 where there is none
            "== 0",
            "3m",
            "critical",
        ),
        Alert(
            "RouterDown",
            "{{ $labels.pod }}: this router does not answer Prometheus.",
            smallest(now.up(component="router"), *BY_POD),
            "== 0",
            "5m",
        ),
        Alert(
            "NotReady",
            f"{NAMED}: no router has a pair of workers to send requests to.",
            largest(now.gauge("workers", state="routable"), *WHERE),
            "== 0",
            "2m",
            "critical",
        ),
    )


def failures(t: Thresholds, now: Scope) -> tuple[Alert, ...]:
    """Requests that fail, and attempts that do."""
    ended = total(now.rate("requests"), *WHERE)
    faults = ratio(total(now.rate("requests", status=SERVER_FAULTS), *WHERE), ended)
    faults = f"{faults} or 0 * {ended}"
    share = "{{ $value | humanizePercentage }}"
    return (
        Alert("Errors", f"{NAMED}: {share} of the requests fail.", faults, f"> {t.errors:g}", "10m"),
        Alert(
            "ManyErrors", f"{NAMED}: {share} of the requests fail.", faults, f"> {t.many_errors:g}", "5m", "critical"
        ),
        Alert(
            "Retries",
            f"{NAMED}: {share} of the attempts fail and are retried.",
            f"{ratio(total(now.rate('retries'), *WHERE), total(now.rate('decisions'), *WHERE))} or 0 * {ended}",
            f"> {t.retries:g}",
            "10m",
        ),
        Alert(
            "RetryBudgetEmpty",
            f"{NAMED}: so many attempts fail that routers no longer retry.",
            total(now.rate("retries_refused"), *WHERE),
            "> 0",
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
            f"> {t.ttft:g}",
            "10m",
        ),
        Alert(
            "TokensSlow",
            f"{NAMED}: the 99th percentile of the time between tokens is {took}.",
            now.quantile(0.99, "itl", *WHERE),
            f"> {t.inter_token:g}",
            "10m",
        ),
        Alert(
            "QueueGrows",
            f"{NAMED}: requests wait, and their number grows.",
            total(now.slope("queued"), *WHERE),
            "> 0",
            "10m",
            guard=f"{total(now.lowest('queued'), *WHERE)} > 0",
        ),
        Alert(
            "RequestsRefused",
            f"{NAMED}: the queue is full or too slow; {{{{ $value | humanize }}}} requests per second are refused.",
            f"{total(now.rate('requests', status='~queue_full|deadline_too_short'), *WHERE)} or 0 * {ended}",
            "> 0",
        ),
    )
