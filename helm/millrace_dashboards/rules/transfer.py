"""Prefill, decode, and the KV pages between them."""

from __future__ import annotations

from millrace_common.metrics import KV_FAULTS

from millrace_dashboards.alert import BY_POD, WHERE, Alert, Thresholds
from millrace_dashboards.promql import Scope, largest, ratio, total
from millrace_dashboards.rules.service import NAMED


def transfers(t: Thresholds, now: Scope) -> tuple[Alert, ...]:
    """Whether pages arrive, and how fast."""
    ok = total(now.rate("requests", status="ok"), *WHERE)
    has_prefill = largest(now.gauge("workers", role="prefill", state="discovered"), *WHERE)
    return (
        Alert(
            "KvTransfersFail",
            "{{ $labels.pod }}: transfers of KV pages fail ({{ $labels.reason }}).",
            total(now.rate("kv_failures", reason="~" + "|".join(KV_FAULTS)), *BY_POD, "reason"),
            0,
            by=(*BY_POD, "reason"),
        ),
        Alert(
            "KvSlow",
            "{{ $labels.pod }}: KV pages are read at {{ $value | humanize }}B/s. Is it TCP instead of RDMA?",
            ratio(total(now.rate("kv_bytes"), *BY_POD), total(now.observed("kv_read", "sum"), *BY_POD)),
            t.kv_bytes_per_second,
            "10m",
            guard=f"{total(now.rate('kv_bytes'), *BY_POD)} > 0",
            by=BY_POD,
            unit="Bps",
            sign="<",
        ),
        Alert(
            "PrefillIdle",
            f"{NAMED}: requests are answered, and no prefill worker computes.",
            total(now.rate("engine", what="prompt_tokens", component="prefill"), *WHERE),
            0,
            "10m",
            guard=f"{ok} > 0 and {has_prefill} > 0",
            sign="==",
        ),
        Alert(
            "TokenMismatches",
            "{{ $labels.pod }}: prefill and decode disagree on tokens.",
            total(now.rate("mismatches"), *BY_POD),
            0,
            "0m",
            "critical",
            by=BY_POD,
            unit="ops",
        ),
    )


def pages(t: Thresholds, now: Scope) -> tuple[Alert, ...]:
    """Who holds pages, and for how long."""
    in_use = total(now.gauge("pages", component="~decode|unified", use="running"), *WHERE)
    return (
        Alert(
            "LeasesExpire",
            "{{ $labels.pod }}: leases of parked prompts expire, because decode workers are silent.",
            total(now.rate("leases_ended", outcome="expired"), *BY_POD),
            0,
            by=BY_POD,
        ),
        Alert(
            "LeasesLeak",
            f"{NAMED}: more prompts are parked than there are requests.",
            f"{total(now.lowest('leases'), *WHERE)} - {total(now.gauge('active'), *WHERE)}",
            0,
            "10m",
        ),
        Alert(
            "PagesInQuarantine",
            "{{ $labels.pod }}: reads of failed transfers do not end.",
            total(now.lowest("quarantined"), *BY_POD),
            0,
            "10m",
            by=BY_POD,
        ),
        Alert(
            "DecodeFull",
            f"{NAMED}: decode workers have hardly any free KV pages.",
            ratio(in_use, total(now.gauge("pages", component="~decode|unified"), *WHERE)),
            t.pages_in_use,
            "10m",
            unit="percentunit",
        ),
    )
