"""The one catalogue of metrics: every name, unit, label and help text of the system.

A component builds a `Metrics` over its own registry and uses attributes: `metrics.requests.labels(status="ok").inc()`.
Names carry the prefix `millrace_` and a base unit; counters end in `_total`. Labels are bounded sets: the router drops
the series of tenants and workers that are gone. A series that begins at 1 has never increased for Prometheus; so
counters that alerts watch have `known` label values, which are 0 from the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from millrace_common.quick_histogram import QuickHistogram
from millrace_common.reasons import Reason

STAGES = ("queue", "route", "prefill", "kv_transfer", "first_token", "decode", "total")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SHORT = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


KV_FAULTS = (  # reasons of kv_failures that neither a client nor a lost worker causes
    Reason.KV_EXPIRED,
    Reason.KV_MISMATCH,
    Reason.KV_NOT_FOUND,
    Reason.LAYOUT_MISMATCH,
    Reason.STALLED,
    Reason.TRANSFER_FAILED,
)


@dataclass(frozen=True, slots=True)
class Metric:
    attr: str
    name: str
    kind: type[Counter] | type[Gauge] | type[Histogram] | type[QuickHistogram]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    known: tuple[tuple[str, ...], ...] = ()  # label values, in the order of `labels`


ROUTER = (
    Metric("requests", "millrace_requests_total", Counter, "Requests by how they ended.", ("api", "status")),
    Metric("stage", "millrace_stage_seconds", Histogram, "Time of a request in each stage.", ("stage",), _SECONDS),
    Metric("itl", "millrace_inter_token_seconds", QuickHistogram, "Time between a stream's token batches.", (), _SHORT),
    Metric("tokens", "millrace_tokens_total", Counter, "Tokens, by direction.", ("direction",)),
    Metric("queued", "millrace_queue_requests", Gauge, "Requests waiting for a pair of workers."),
    Metric("queued_tokens", "millrace_queue_tokens", Gauge, "Prompt tokens of the waiting requests."),
    Metric("queue_wait", "millrace_queue_wait_seconds", Gauge, "Estimated time until the waiting requests are served."),
    Metric("tenant_requests", "millrace_tenant_requests_total", Counter, "Requests by API key.", ("tenant", "status")),
    Metric("tenant_tokens", "millrace_tenant_tokens_total", Counter, "Tokens by API key.", ("tenant", "direction")),
    Metric("active", "millrace_active_requests", Gauge, "Requests being worked on."),
    Metric(
        "retries", "millrace_retries_total", Counter, "Further attempts, by the reason of the failed one.", ("reason",)
    ),
    Metric("retries_refused", "millrace_retries_refused_total", Counter, "Attempts that the budget did not allow."),
    Metric("retries_left", "millrace_retry_budget_attempts", Gauge, "Further attempts that the budget allows now."),
    Metric("ejected", "millrace_ejected_workers", Gauge, "Workers that get no requests for a while.", ("role",)),
    Metric(
        "ejections", "millrace_ejections_total", Counter, "Ejections: consecutive, failing or slow.", ("role", "why")
    ),
    Metric("workers", "millrace_workers", Gauge, "Discovered, healthy and routable workers.", ("role", "state")),
    Metric("pairs", "millrace_pairs", Gauge, "Pairs of workers by how far their hooks are.", ("state",)),
    Metric(
        "discovery_synced",
        "millrace_discovery_last_sync_timestamp_seconds",
        Gauge,
        "Time of the last list of workers from discovery.",
    ),
    Metric(
        "discovery_changes", "millrace_discovery_changes_total", Counter, "Workers that discovery changed.", ("change",)
    ),
    Metric("discovery_troubles", "millrace_discovery_troubles_total", Counter, "Looks that failed.", ("kind",)),
    Metric("hooks", "millrace_hooks_total", Counter, "Warm-up and GC-freeze hooks run.", ("hook", "outcome")),
    Metric(
        "decisions",
        "millrace_decisions_total",
        Counter,
        "Placements of attempts: pair, prefill_only, local or unified.",
        ("way", "prefill_policy", "decode_policy"),
    ),
    Metric(
        "expected_cached_tokens",
        "millrace_expected_cached_tokens_total",
        Counter,
        "Prompt tokens that the chosen worker was expected to have cached.",
    ),
    Metric("cache_feeds", "millrace_cache_feeds", Gauge, "Workers whose prefix caches are followed."),
    Metric(
        "cache_snapshots", "millrace_cache_snapshots_total", Counter, "Snapshots of workers' prefix caches received."
    ),
    Metric("cache_gaps", "millrace_cache_gaps_total", Counter, "Gaps in the workers' reports of their prefix caches."),
    Metric(
        "drafted_tokens",
        "millrace_drafted_tokens_total",
        Counter,
        "Drafts of ended attempts, by the addresses of their workers.",
        ("prefill", "decode"),
    ),
    Metric(
        "accepted_draft_tokens",
        "millrace_accepted_draft_tokens_total",
        Counter,
        "Drafts that became output tokens, by the addresses of their workers.",
        ("prefill", "decode"),
    ),
    Metric("stale", "millrace_stale_messages_total", Counter, "Messages with a stale attempt number.", ("kind",)),
    Metric("mismatches", "millrace_token_mismatches_total", Counter, "Prefill and decode disagreed on a token."),
)
WORKER = (
    Metric("state", "millrace_worker_state", Gauge, "1 for the worker's current state.", ("state",)),
    Metric("startup", "millrace_startup_seconds", Gauge, "Time of each phase of the start.", ("phase",)),
    Metric("sequences", "millrace_sequences", Gauge, "Sequences by what they do.", ("replica", "doing")),
    Metric("pages", "millrace_kv_pages", Gauge, "KV pages by use.", ("replica", "use")),
    Metric("waiting_tokens", "millrace_waiting_tokens", Gauge, "Prompt tokens still to be computed.", ("replica",)),
    Metric("credits", "millrace_credits", Gauge, "Further requests the replica is willing to take.", ("replica",)),
    Metric(
        "engine", "millrace_engine_total", Counter, "Engine counts: steps, tokens, preemptions.", ("replica", "what")
    ),
    Metric(
        "drafts", "millrace_drafts_total", Counter, "Drafts verified, by their place, from 1.", ("replica", "position")
    ),
    Metric(
        "drafts_accepted",
        "millrace_drafts_accepted_total",
        Counter,
        "Drafts that became output tokens, by their place.",
        ("replica", "position"),
    ),
    Metric("kv_bytes", "millrace_kv_bytes_total", Counter, "KV bytes read from prefill workers."),
    Metric(
        "kv_transfer", "millrace_kv_transfer_seconds", Histogram, "From the last part's arrival to held.", (), _SHORT
    ),
    Metric(
        "kv_read", "millrace_kv_read_seconds", Histogram, "From a read's posting to its end on all ranks.", (), _SHORT
    ),
    Metric(
        "kv_failures",
        "millrace_kv_failures_total",
        Counter,
        "KV transfers that failed.",
        ("reason",),
        known=tuple((reason,) for reason in KV_FAULTS),
    ),
    Metric("leases", "millrace_leases", Gauge, "Parked prompts."),
    Metric(
        "leases_ended",
        "millrace_leases_ended_total",
        Counter,
        "Leases by how they ended.",
        ("outcome",),
        known=(("released",), ("expired",), ("aborted",)),
    ),
    Metric("quarantined", "millrace_quarantined_pages", Gauge, "Pages of transfers that are over but not yet final."),
    Metric(
        "worker_stale", "millrace_worker_stale_messages_total", Counter, "Messages for unknown attempts.", ("kind",)
    ),
)
PROCESS = (
    Metric("started", "millrace_start_timestamp_seconds", Gauge, "When the process started."),
    Metric(
        "gc_pause",
        "millrace_gc_pause_seconds",
        Histogram,
        "Garbage-collection pauses.",
        ("process", "generation"),
        _SHORT,
    ),
    Metric(
        "loop_lag", "millrace_event_loop_lag_seconds", Histogram, "How late the event loop is.", ("process",), _SHORT
    ),
    Metric(
        "reloads",
        "millrace_reloads_total",
        Counter,
        "Changed files (certificates, keys) by whether they are used.",
        ("what", "outcome"),
        known=(("certificates", "failed"), ("api_keys", "failed")),
    ),
    Metric("gc_freezes", "millrace_gc_freezes_total", Counter, "GC freezes.", ("process",)),
    Metric("gc_frozen", "millrace_gc_frozen_objects", Gauge, "Objects frozen by the latest freeze.", ("process",)),
)


class Metrics:
    """The metrics of one component in one registry, one attribute each."""

    def __init__(self, rows: tuple[Metric, ...], registry: CollectorRegistry) -> None:
        self.registry = registry
        for row in rows:
            options: dict[str, Any] = {"buckets": row.buckets} if row.buckets else {}
            metric: Any = row.kind(row.name, row.help, row.labels, registry=registry, **options)
            for values in row.known:
                metric.labels(*values)
            setattr(self, row.attr, metric)

    def __getattr__(self, name: str) -> Any:  # only reached for names that no row defines
        raise AttributeError(f"no metric {name!r} in the catalogue")
