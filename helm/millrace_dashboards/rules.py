"""The alert rules, by what they are about."""

from __future__ import annotations

from millrace_rpc.metrics import KV_FAULTS

from millrace_dashboards.alert import WHERE, Alert, Thresholds
from millrace_dashboards.boards.common import SERVER_FAULTS
from millrace_dashboards.promql import Scope, largest, number, ratio, total


def service(t: Thresholds, now: Scope) -> tuple[Alert, ...]:
    """What clients feel."""
    ended = total(now.rate("requests"), *WHERE)
    faults = ratio(total(now.rate("requests", status=SERVER_FAULTS), *WHERE), ended)
    faults = f"{faults} or 0 * {ended}"
    where = "{{ $labels.model }} in {{ $labels.namespace }}"
    queued = total(now.lowest("queued"), *WHERE)
    return (
        Alert(
            "NotReady",
            f"{where}: no router has a pair of workers to send requests to.",
            largest(now.gauge("workers", state="routable"), *WHERE),
            "== 0",
            "2m",
            "critical",
            runbook="nothing-is-routable",
        ),
        Alert(
            "Errors",
            f"{where}: {{{{ $value | humanizePercentage }}}} of the requests fail.",
            faults,
            f"> {t.errors:g}",
            "10m",
            runbook="requests-fail",
        ),
        Alert(
            "ManyErrors",
            f"{where}: {{{{ $value | humanizePercentage }}}} of the requests fail.",
            faults,
            f"> {t.many_errors:g}",
            "5m",
            "critical",
            runbook="requests-fail",
        ),
        Alert(
            "FirstTokenSlow",
            f"{where}: the 99th percentile of the time to the first token is {{{{ $value | humanizeDuration }}}}.",
            now.quantile(0.99, "stage", *WHERE, stage="first_token"),
            f"> {t.ttft:g}",
            "10m",
            runbook="the-first-token-is-slow",
        ),
        Alert(
            "TokensSlow",
            f"{where}: the 99th percentile of the time between tokens is {{{{ $value | humanizeDuration }}}}.",
            now.quantile(0.99, "itl", *WHERE),
            f"> {t.inter_token:g}",
            "10m",
            runbook="tokens-are-slow",
        ),
        Alert(
            "QueueGrows",
            f"{where}: requests wait, and ever more of them.",
            total(now.slope("queued"), *WHERE),
            "> 0",
            "10m",
            guard=f"{queued} > 0",
            runbook="the-queue-grows",
        ),
        Alert(
            "RequestsRefused",
            f"{where}: the queue is full or too slow; {{{{ $value | humanize }}}} requests per second are refused.",
            f"{total(now.rate('requests', status='~queue_full|deadline_too_short'), *WHERE)} or 0 * {ended}",
            "> 0",
            "5m",
            runbook="the-queue-grows",
        ),
        Alert(
            "RetryBudgetEmpty",
            f"{where}: so many attempts fail that routers no longer try again.",
            total(now.rate("retries_refused"), *WHERE),
            "> 0",
            "5m",
            runbook="requests-fail",
        ),
        Alert(
            "Retries",
            f"{where}: {{{{ $value | humanizePercentage }}}} of the attempts fail and are tried again.",
            f"{ratio(total(now.rate('retries'), *WHERE), total(now.rate('decisions'), *WHERE))} or 0 * {ended}",
            f"> {t.retries:g}",
            "10m",
            runbook="requests-fail",
        ),
    )


def transfer(t: Thresholds, now: Scope) -> tuple[Alert, ...]:
    """Prefill, decode, and what travels between them."""
    by_pod = (*WHERE, "pod")
    ok = total(now.rate("requests", status="ok"), *WHERE)
    has_prefill = largest(now.gauge("workers", role="prefill", state="discovered"), *WHERE)
    faults = "~" + "|".join(KV_FAULTS)
    in_use = total(now.gauge("pages", component="~decode|unified", use="running"), *WHERE)
    return (
        Alert(
            "KvTransfersFail",
            "{{ $labels.pod }}: transfers of KV pages fail ({{ $labels.reason }}).",
            total(now.rate("kv_failures", reason=faults), *by_pod, "reason"),
            "> 0",
            "5m",
            runbook="kv-transfers-fail",
        ),
        Alert(
            "KvSlow",
            "{{ $labels.pod }}: KV pages are read at {{ $value | humanize }}B/s. Is it TCP instead of RDMA?",
            ratio(total(now.rate("kv_bytes"), *by_pod), total(now.observed("kv_read", "sum"), *by_pod)),
            f"< {t.kv_bytes_per_second:g}",
            "10m",
            guard=f"{total(now.rate('kv_bytes'), *by_pod)} > 0",
            on=by_pod,
            runbook="kv-is-slow",
        ),
        Alert(
            "PrefillIdle",
            "{{ $labels.model }} in {{ $labels.namespace }}: requests are answered, and no prefill worker computes.",
            total(now.rate("engine", what="prompt_tokens", component="prefill"), *WHERE),
            "== 0",
            "10m",
            guard=f"{ok} > 0 and {has_prefill} > 0",
            runbook="prefill-is-idle",
        ),
        Alert(
            "LeasesExpire",
            "{{ $labels.pod }}: parked prompts are given up, because no decode worker was heard in time.",
            total(now.rate("leases_ended", outcome="expired"), *by_pod),
            "> 0",
            "5m",
            runbook="leases-expire",
        ),
        Alert(
            "LeasesLeak",
            "{{ $labels.model }} in {{ $labels.namespace }}: more prompts are parked than there are requests.",
            f"{total(now.lowest('leases'), *WHERE)} - {total(now.gauge('active'), *WHERE)}",
            "> 0",
            "10m",
            runbook="leases-expire",
        ),
        Alert(
            "PagesInQuarantine",
            "{{ $labels.pod }}: reads of failed transfers do not end.",
            total(now.lowest("quarantined"), *by_pod),
            "> 0",
            "10m",
            runbook="kv-transfers-fail",
        ),
        Alert(
            "DecodeFull",
            "{{ $labels.model }} in {{ $labels.namespace }}: decode workers have hardly any free KV pages.",
            ratio(in_use, total(now.gauge("pages", component="~decode|unified"), *WHERE)),
            f"> {t.pages_in_use:g}",
            "10m",
            runbook="the-queue-grows",
        ),
        Alert(
            "TokenMismatches",
            "{{ $labels.pod }}: prefill and decode disagree on tokens.",
            total(now.rate("mismatches"), *by_pod),
            "> 0",
            "0m",
            "critical",
            runbook="tokens-mismatch",
        ),
    )


def recorded(now: Scope) -> dict[str, str]:
    """Names and expressions of what autoscalers read."""
    in_use, by_pod = now.gauge("pages", use="~running|published"), ("namespace", "pod")
    return {"millrace_kv_use_ratio": ratio(total(in_use, *by_pod), total(now.gauge("pages"), *by_pod))}


def processes(t: Thresholds, now: Scope, lately: Scope) -> tuple[Alert, ...]:
    """Workers, routers, and what watches them."""
    by_pod, by_role = (*WHERE, "pod"), (*WHERE, "role")
    known = largest(now.gauge("workers", role="~prefill|decode|unified", state="discovered"), *by_role)
    routable = largest(now.gauge("workers", role="~prefill|decode|unified", state="routable"), *by_role)
    seen = number(now.gauge("state", state="ready"), *WHERE)
    ready = total(now.gauge("workers", state="routable"), *by_pod)
    started = number(now.gauge("started"), *by_pod)
    frozen = number(now.gauge("gc_frozen", process="~frontend|router"), *by_pod)
    return (
        Alert(
            "WorkersNotRoutable",
            "{{ $labels.model }} in {{ $labels.namespace }}: {{ $value }} {{ $labels.role }} workers get no requests.",
            f"{known} - {routable}",
            "> 0",
            "30m",
            runbook="workers-are-not-routable",
        ),
        Alert(
            "WorkersShunned",
            "{{ $labels.model }} in {{ $labels.namespace }}: {{ $labels.role }} workers fail or are slow.",
            largest(now.gauge("ejected"), *by_role) + " + " + largest(now.gauge("breakers", state="open"), *by_role),
            "> 0",
            "10m",
            runbook="workers-are-not-routable",
        ),
        Alert(
            "Restarts",
            "{{ $labels.pod }} has started {{ $value }} times again.",
            largest(lately.changes("started"), *by_pod),
            f">= {t.restarts}",
            "0m",
            runbook="workers-are-not-routable",
        ),
        Alert(
            "MetricsMissing",
            "{{ $labels.model }} in {{ $labels.namespace }}: {{ $value }} workers serve and are not scraped.",
            f"{total(routable, *WHERE)} - ({seen} or 0 * {total(routable, *WHERE)})",
            "> 0",
            "5m",
            runbook="metrics-are-missing",
        ),
        Alert(
            "DiscoveryStale",
            "{{ $labels.pod }}: nobody has said for {{ $value | humanizeDuration }} which workers exist.",
            f"time() - {largest(now.gauge('discovery_synced'), *by_pod)}",
            f"> {t.discovery_age:g}",
            "0m",
            guard=f"{total(lately.increase('discovery_troubles'), *by_pod)} > 0",
            on=by_pod,
            runbook="discovery-is-stale",
        ),
        Alert(
            "GcPauses",
            f"{{{{ $labels.pod }}}} ({{{{ $labels.process }}}}): collections pause it for more than {t.gc_pause:g} s.",
            now.beyond(t.gc_pause, "gc_pause", *by_pod, "process"),
            "> 0",
            "5m",
            runbook="processes-pause",
        ),
        Alert(
            "GcNotFrozen",
            "{{ $labels.pod }} serves without a GC freeze.",
            f"{started} - {frozen} or {started}",
            "> 0",
            "10m",
            guard=f"{ready} > 0 or {total(now.gauge('state', state='ready'), *by_pod)} > 0",
            on=by_pod,
            runbook="processes-pause",
        ),
        Alert(
            "EventLoopLags",
            "{{ $labels.pod }}: its event loop is {{ $value | humanizeDuration }} late.",
            now.quantile(0.99, "loop_lag", *by_pod),
            f"> {t.loop_lag:g}",
            "5m",
            runbook="processes-pause",
        ),
        Alert(
            "FilesNotUsed",
            "{{ $labels.pod }}: changed {{ $labels.what }} cannot be used; the old ones still are.",
            total(lately.increase("reloads", outcome="failed"), *by_pod, "what"),
            "> 0",
            "0m",
            runbook="rotate",
        ),
    )
